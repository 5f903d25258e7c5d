"""Certificates of the webhooks are replaced before they end, and stay trusted."""

from __future__ import annotations

from datetime import timedelta

import pytest
from cryptography import x509

from holdfast.operator import certificates
from tests.unit.operator.objects import NOW


def test_the_next_certificate_is_trusted_by_whoever_trusts_the_first():
    first = certificates.make("a.b.svc", NOW)
    second = certificates.make("a.b.svc", NOW + timedelta(days=300), first)
    assert second.authority == first.authority
    assert second.certificate != first.certificate
    authority = x509.load_pem_x509_certificate(first.authority)
    x509.load_pem_x509_certificate(second.certificate).verify_directly_issued_by(authority)


@pytest.mark.parametrize("days", [0, 3500])
def test_an_authority_that_ends_or_has_lost_its_key_is_followed_by_another_and_trusted_for_a_while(days):
    first = certificates.make("a.b.svc", NOW)
    known = first if days else certificates.Bundle(first.certificate, first.key, first.authority)
    second = certificates.make("a.b.svc", NOW + timedelta(days=days), known)
    newest, older = x509.load_pem_x509_certificates(second.authority)
    assert older == x509.load_pem_x509_certificate(first.authority)
    x509.load_pem_x509_certificate(second.certificate).verify_directly_issued_by(newest)
