"""Where notices come from: signals, a file, a cloud's metadata endpoint."""

from holdfast.notice.base import Notice, NoticeSource
from holdfast.notice.cloud import cloud_source
from holdfast.notice.file import FileSource
from holdfast.notice.signals import SignalSource, listen

__all__ = ["FileSource", "Notice", "NoticeSource", "SignalSource", "cloud_source", "listen"]
