"""Files of ``torch.save`` inside a checkpoint: what they name besides tensors and plain values.

Such a file is a pickle, and reading a pickle calls whatever it names. A resume reads them by torch's ``weights_only``,
which calls what makes tensors and plain values, and refuses all else. Here the pickle is not read but taken apart, so
that the command line, too, can tell what a resume refuses: nothing that it names is called or imported.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import IO, Any

from holdfast.base.words import shown

LIGHTNING = "lightning.ckpt"
_RANDOM = re.compile(r"(.*/)?rng_state\w*\.pth")
_TRAINERS = re.compile(r"(.*/)?((optimizer|scheduler|scaler)\.pt|(pytorch|adapter)_model[-\w]*\.bin)")
_LARGEST = 1 << 30
_MOST_NAMED = 5
_OPCODES = re.compile(
    "PROTO|STOP|MARK|GLOBAL|NEWOBJ|REDUCE|BUILD|APPENDS?|SETITEMS?|TUPLE[123]?|NONE|NEWFALSE|NEWTRUE|"
    "EMPTY_(TUPLE|LIST|DICT|SET)|"
    "BINPERSID|BININT[12]?|BINFLOAT|BINUNICODE|SHORT_BINSTRING|LONG1|(LONG_)?BIN(GET|PUT)"
)
"""Those that torch's reader knows."""
_REBUILD = (
    "parameter(_with_state)?|qtensor|tensor(_v2|_v3)?|sparse_tensor|meta_tensor_no_storage|nested_tensor|"
    "wrapper_subclass|device_tensor_from_(numpy|cpu_tensor)"
)
_TENSORS = (
    r"collections\.(OrderedDict|Counter)|_codecs\.encode|builtins\.(set|bytearray|complex)"
    r"|torch\.(Size|Tensor|device|nn\.parameter\.Parameter|serialization\._get_layout|_tensor\._rebuild_from_type_v2)"
    rf"|torch\._utils\._rebuild_({_REBUILD})"
    r"|torch\.(cuda\.|sparse\.|cuda\.sparse\.|storage\.)?[A-Z][A-Za-z0-9]*(Storage|Tensor)"
    r"|torch\.(b?float\w*|double|half|complex\w+|u?int\d+|long|short|bool|q\w*int\w+|per_(tensor|channel)_\w+)"
)
_NUMPY = r"numpy\.(_core|core)\.multiarray\.(_reconstruct|scalar)|numpy\.(ndarray|dtype)"
_VALUES = (
    r"builtins\.(frozenset|range|slice)|pathlib\.(_local\.)?PosixPath|datetime\.(date|time|datetime|timedelta|timezone)"
    r"|argparse\.Namespace|types\.SimpleNamespace|decimal\.Decimal|fractions\.Fraction"
)
_OF_TRAINER, _OF_RANDOM, _OF_LIGHTNING = (
    re.compile("|".join(kinds)) for kinds in ((_TENSORS,), (_TENSORS, _NUMPY), (_TENSORS, _NUMPY, _VALUES))
)
"""What makes plain values, whatever it is called with: by file, what its reader lets pass."""


_SHARDS = re.compile(r"(.*/)?(__\d+)?\.metadata")
_OF_SHARDS = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|MetadataIndex|StorageMeta|Tensor(StorageMetadata|Properties)|"
    r"(Bytes|Chunk)StorageMetadata|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem\._StorageInfo|"
    rf"pathlib\.(_local\.)?(Pure)?PosixPath|{_TENSORS}"
)
"""What the ``.metadata`` of ``torch.distributed.checkpoint`` is made of."""


def is_pickle(path: str) -> bool:
    """Whether a resume reads this file of a checkpoint as a pickle."""
    return path == LIGHTNING or any(kind.fullmatch(path) for kind in (_TRAINERS, _RANDOM, _SHARDS))


def may_describe_shards(module: str, name: str) -> bool:
    return _OF_SHARDS.fullmatch(f"{module}.{name}") is not None


def refused(path: str, file: IO[bytes]) -> list[str]:
    """What in this file of a checkpoint a resume does not read, by name; an empty list: it reads all of it."""
    if _SHARDS.fullmatch(path):
        return _refused_in_metadata(file)
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [one for one in archive.infolist() if one.filename.endswith(".pkl")]
            if [one.filename.rpartition("/")[2] for one in pickles] != ["data.pkl"]:
                return ["something else than one pickle"]
            if pickles[0].compress_type != zipfile.ZIP_STORED or pickles[0].file_size > _LARGEST:
                return [f"a pickle of {pickles[0].file_size} bytes, packed into {pickles[0].compress_size}"]
            with archive.open(pickles[0]) as content:
                return refused_in(path, content)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        return [f"no archive of torch.save ({error})"]


def refused_value(file: IO[bytes]) -> list[str]:
    """As :func:`refused`, of a value among the shards."""
    return refused("optimizer.pt", file)


def refusal(names: list[str]) -> str:
    """The same in words."""
    named = ", ".join(shown(name) for name in names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")
    return f"holds what could run code when it is read: {named}. A resume refuses it"


def refused_in(path: str, pickle: IO[bytes]) -> list[str]:
    """As :func:`refused`, of the pickle alone."""
    allowed = _OF_LIGHTNING if path == LIGHTNING else _OF_RANDOM if _RANDOM.fullmatch(path) else _OF_TRAINER
    found = set()
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            if opcode.name == "GLOBAL":
                name = _today(*str(argument).split(" ", 1))
                if not allowed.fullmatch(name):
                    found.add(name)
            elif not _OPCODES.fullmatch(opcode.name):
                found.add(f"the pickle's instruction {opcode.name}")
    except (ValueError, EOFError) as error:
        found.add(f"a broken pickle ({error})")
    return sorted(found)


def _today(module: str, name: str) -> str:
    """The name of today for what a pickle of Python 2's protocol names."""
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}"


class _Inert:
    """Stands for whatever a pickle names, and does nothing."""

    def __new__(cls, *_: Any) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None: ...


def _refused_in_metadata(file: IO[bytes]) -> list[str]:
    """This one is of a protocol in which names are made by the pickle: it is read, but nothing that it names is."""
    found: set[str] = set()

    class Names(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if not may_describe_shards(module, name):
                found.add(f"{module}.{name}")
            return type("_Inert", (_Inert,), {})

    try:
        if file.seek(0, 2) > _LARGEST:
            return ["a pickle that is too large"]
        file.seek(0)
        Names(file).load()
    except Exception as error:  # whatever a broken one leads to
        found.add(f"a broken pickle ({error})")
    return sorted(found)
