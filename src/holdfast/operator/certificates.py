"""The webhooks' certificate: made by the operator itself, kept in a secret that its replicas share, and renewed.

Where cert-manager is used instead, none of this runs: the chart mounts cert-manager's secret.
"""

from __future__ import annotations

import base64
import datetime as dt
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from kubernetes_asyncio import client
from kubernetes_asyncio.client.exceptions import ApiException

from holdfast.operator.cluster import Cluster

log = logging.getLogger("holdfast.operator")

VALID = dt.timedelta(days=365)
RENEW_BEFORE = dt.timedelta(days=90)
AUTHORITY_VALID = dt.timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Bundle:
    """PEM texts. ``authority`` holds earlier ones too: replicas change over at their own time."""

    certificate: bytes
    key: bytes
    authority: bytes
    authority_key: bytes = b""
    """Of the first of them; kept, so that whoever trusts it trusts the next certificate too."""

    @property
    def expires(self) -> dt.datetime:
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    def serves(self, host: str) -> bool:
        found = x509.load_pem_x509_certificate(self.certificate).extensions
        names = found.get_extension_for_class(x509.SubjectAlternativeName).value
        return host in names.get_values_for_type(x509.DNSName)

    def write(self, folder: Path) -> None:
        """Into files that only this user can read. Who serves them looks at them in the same event loop: never in the
        middle of this."""
        for name, data in (("tls.crt", self.certificate), ("tls.key", self.key), ("ca.crt", self.authority)):
            temporary = folder / f".{name}.tmp"
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            os.replace(temporary, folder / name)


def make(host: str, now: dt.datetime, older: Bundle | None = None, valid: dt.timedelta = VALID) -> Bundle:
    """A certificate for ``host``, signed by the authority of ``older``, or by a new one where that cannot sign it."""
    kept = _signing_key(older, now + valid) if older is not None else None
    authority_key = kept or ec.generate_private_key(ec.SECP256R1())
    authority = older.authority if older is not None else b""
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "holdfast operator authority")])

    def signed(
        name: x509.Name, public: Any, valid: dt.timedelta, *extensions: tuple[x509.ExtensionType, bool]
    ) -> bytes:
        builder = x509.CertificateBuilder(
            authority_name, name, public, x509.random_serial_number(), now - dt.timedelta(minutes=5), now + valid
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    if kept is None:
        new = signed(
            authority_name,
            authority_key.public_key(),
            AUTHORITY_VALID,
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (identifier, False),
        )
        authority = new + b"".join(_newest(authority, 2))
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = signed(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])]),
        key.public_key(),
        valid,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName([x509.DNSName(host)]), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), False),
    )
    return Bundle(certificate, _pem(key), authority, _pem(authority_key))


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _signing_key(bundle: Bundle, until: dt.datetime) -> ec.EllipticCurvePrivateKey | None:
    """The key of its authority, if that is there and valid until then."""
    try:
        key = serialization.load_pem_private_key(bundle.authority_key, None)
        (newest,) = _newest(bundle.authority, 1)
        authority = x509.load_pem_x509_certificate(newest)
    except ValueError:
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        return None
    return key if authority.not_valid_after_utc > until else None


def _newest(pems: bytes, count: int) -> list[bytes]:
    end = b"-----END CERTIFICATE-----\n"
    return [part + end for part in pems.split(end) if part.strip()][:count]


async def ensure(cluster: Cluster, namespace: str, name: str, host: str, now: dt.datetime | None = None) -> Bundle:
    """The certificate in the secret; a new one where there is none, or it ends soon. Replicas may race for it."""
    now = now or dt.datetime.now(dt.UTC)
    for _ in range(5):
        try:
            secret = await cluster.core.read_namespaced_secret(name, namespace)
        except ApiException as error:
            if error.status != 404:
                raise
            secret = None
        bundle = _bundle(secret)
        if bundle is not None and bundle.serves(host) and bundle.expires - now > RENEW_BEFORE:
            return bundle
        bundle = make(host, now, bundle)
        data = {"tls.crt": bundle.certificate, "tls.key": bundle.key, "ca.crt": bundle.authority}
        data["ca.key"] = bundle.authority_key
        body = client.V1Secret(
            metadata=client.V1ObjectMeta(
                name=name, resource_version=secret.metadata.resource_version if secret is not None else None
            ),
            type="kubernetes.io/tls",
            data={key: base64.b64encode(value).decode() for key, value in data.items()},
        )
        try:
            if secret is None:
                await cluster.core.create_namespaced_secret(namespace, body)
            else:
                await cluster.core.replace_namespaced_secret(name, namespace, body)
            log.info("made a certificate for %s, valid until %s", host, bundle.expires.date())
        except ApiException as error:
            if error.status != 409:
                raise
    raise RuntimeError(f"secret {namespace}/{name} changes each time it is to be written")


def _bundle(secret: Any) -> Bundle | None:
    data = (secret.data or {}) if secret is not None else {}
    try:
        certificate, key, authority = (base64.b64decode(data[name]) for name in ("tls.crt", "tls.key", "ca.crt"))
        bundle = Bundle(certificate, key, authority, base64.b64decode(data.get("ca.key", "")))
        _ = bundle.expires
    except (KeyError, ValueError):
        return None
    return bundle


async def authority(cluster: Cluster, namespace: str, name: str) -> bytes | None:
    """Whom to trust, as the secret says, in which any replica may have written."""
    bundle = _bundle(await cluster.core.read_namespaced_secret(name, namespace))
    return bundle.authority if bundle is not None else None


async def tell_webhooks(cluster: Cluster, configuration: str, authority: bytes) -> bool:
    """Let the API server trust the certificate; returns whether it did not before."""
    api = client.AdmissionregistrationV1Api(cluster.api)
    found = await api.read_mutating_webhook_configuration(configuration)
    text = base64.b64encode(authority).decode()
    operations = [
        {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": text}
        for index, webhook in enumerate(found.webhooks or [])
        if webhook.client_config.ca_bundle != text
    ]
    if operations:
        version = {"op": "test", "path": "/metadata/resourceVersion", "value": found.metadata.resource_version}
        await api.patch_mutating_webhook_configuration(
            configuration, [version, *operations], _content_type="application/json-patch+json"
        )
        log.info("told the API server of the certificate's authority")
    return bool(operations)
