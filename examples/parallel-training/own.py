"""A function of a person's own, named as ``module:function``: where it is looked for, and why it is refused."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


class OwnError(Exception):
    """There is no such function. The message says why, and begins with the option and its value."""


def find(option: str, name: str, such_as: str) -> Callable[..., Any]:
    """The function that an option names. Its module is looked for beside this one and in the working folder.

    It may not import TensorFlow, which has to wait until a process has its cores.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module_name, _, function_name = name.partition(":")
    refused = f"{option}={name!r} is not accepted"
    if not module_name or not function_name:
        raise OwnError(f"{refused}; it must be module:function, such as {such_as}")
    loaded = "tensorflow" in sys.modules
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise OwnError(f"{refused}: {module_name} cannot be imported: {error!r}") from None
    if "tensorflow" in sys.modules and not loaded:
        raise OwnError(f"{refused}: {module_name} imports TensorFlow, which must wait until the function is called")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise OwnError(f"{refused}: {module_name} has no function {function_name}")
    return function  # type: ignore[no-any-return, unused-ignore]
