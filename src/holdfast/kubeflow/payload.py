"""A training function on its way to other machines: it arrives as it was written, byte for byte.

The SDK takes a function's source text and puts it into a shell script, where ``$``, backquotes and backslashes mean
something else. So it gets another function, of letters that no shell looks at, which holds the source in base64 and
runs it. What cannot work over there (a closure, a name of the notebook) is refused here, before anything is submitted.
"""

from __future__ import annotations
import __future__

import ast
import base64
import builtins
import dis
import hashlib
import inspect
import linecache
import pickle
import tokenize
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from holdfast.errors import ConfigError

_LONGEST = 90_000
"""Letters of a script that is one argument of a program: Linux takes 131,071, and the SDK adds its own."""
_NOTEBOOK = {"display", "get_ipython", "__IPYTHON__"}
"""What IPython puts beside the builtins."""
_MODULE = {"__name__", "__file__", "__builtins__"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MARK, _FUNCTION = "_holdfast_carries", "_holdfast_function"
_WIDTH = 100

_SCRIPT = '''\
def {name}():
    """Runs the training function that is packed in here."""
    if __name__ != "__main__":
        return  # a process that a data loader has spawned
    import base64, os, pickle, sys, zlib
    packed = (
{packed}
    )
    source, flags, arguments = pickle.loads(zlib.decompress(base64.b64decode(packed)))
    try:
        import _holdfast_startup
    except ImportError:
        print("holdfast is not installed here: this training is not saved", file=sys.stderr)
    else:
        if not _holdfast_startup.started:
            _holdfast_startup.start()
    # A file of its own, so that tracebacks show its lines; ranks that share a folder write the same.
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "{name}_as_written.py")
    try:
        with open(file + "." + str(os.getpid()), "w", encoding="utf-8", newline="") as copy:
            copy.write(source)
        os.replace(copy.name, file)
    except OSError:
        pass
    exec(compile(source, file, "exec", flags, True), globals())
    globals()["{name}"](**arguments)
'''


def carrier(func: Any, arguments: Mapping[str, Any] | None) -> Callable[[], None]:
    """A function without arguments that runs ``func(**arguments)``, and whose source survives a shell."""
    if getattr(func, _MARK, None) is not None:
        if arguments is None:
            return func  # type: ignore[no-any-return]
        source, flags, _ = carried_by(func)  # the same function, with other arguments
        return _packed(getattr(func, _FUNCTION), source, flags, arguments)
    source = source_of(func)
    return _packed(func, source, func.__code__.co_flags & __future__.annotations.compiler_flag, arguments)


def _packed(func: Any, source: str, flags: int, arguments: Mapping[str, Any] | None) -> Callable[[], None]:
    given = _checked_arguments(func, arguments)
    packed = base64.b64encode(zlib.compress(pickle.dumps((source, flags, given), protocol=4), 9)).decode()
    lines = [packed[start : start + _WIDTH] for start in range(0, len(packed), _WIDTH)]
    text = _SCRIPT.format(name=func.__name__, packed="\n".join(f'        "{line}"' for line in lines))
    if len(text) > _LONGEST:
        raise ConfigError(
            f"func: {func.__name__} and its arguments take {len(text):,} letters; accepted are {_LONGEST:,}. Put data "
            f"into a file or a volume"
        )
    made = _function(text, func.__name__, (source, flags, given))
    setattr(made, _FUNCTION, func)
    return made


def _function(text: str, name: str, carried: tuple[str, int, dict[str, Any]]) -> Callable[[], None]:
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    file = f"holdfast_{name}_{digest}.py" if name.isascii() else f"holdfast_{digest}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    space: dict[str, Any] = {"__name__": "__holdfast_carrier__"}
    exec(compile(text, file, "exec"), space)
    made: Callable[[], None] = space[name]
    setattr(made, _MARK, carried)
    return made


def carried_by(func: Any) -> tuple[str, int, dict[str, Any]]:
    """Source, compiler flags and arguments that a carrier holds."""
    found: tuple[str, int, dict[str, Any]] = getattr(func, _MARK)
    return found


def source_of(func: Any) -> str:
    """The function's source; raises ConfigError if it is none that can run elsewhere."""
    if not isinstance(func, FunctionType) or func.__name__ == "<lambda>":
        raise ConfigError(f"func: {_shown(func)} is not accepted; it must be a function made with def")
    name = func.__name__
    if func.__code__.co_freevars:
        raise ConfigError(
            f"func: {name} uses {_list(func.__code__.co_freevars)} of the function around it, which does not exist "
            f"where it is trained; hand values over with func_args, and import modules inside {name}"
        )
    if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func):
        raise ConfigError(f"func: {name} is a coroutine or a generator; it must be a function that trains when called")
    if hasattr(func, "__wrapped__"):
        raise ConfigError(f"func: {name} is a function around another one of that name; give the inner one itself")
    try:
        source = inspect.getsource(func)
    except (SyntaxError, tokenize.TokenError) as error:
        raise _not_its_source(name, error) from None
    except (OSError, TypeError):
        raise ConfigError(
            f"func: the source of {name} cannot be found; define it in a file or in a cell of a notebook"
        ) from None
    if source[:1].isspace():
        # An indented function, with its indentation: to take it away would change texts of several lines in it.
        source = f"if True:\n{source}"
    # At its own place: the body of a class knows its line.
    above = "\n" * (func.__code__.co_firstlineno - 1 - source.startswith("if True:\n"))
    flags = func.__code__.co_flags & __future__.annotations.compiler_flag
    try:
        tree = ast.parse(source)
        code = compile(above + source, f"<{name}>", "exec", flags, True)
    except (SyntaxError, ValueError) as error:
        raise _not_its_source(name, error) from None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        raise ConfigError(f"func: the source of {name} is not the text of one function; define it with def")
    if found[0].decorator_list:
        raise ConfigError(
            f"func: {name} has a decorator, @{ast.unparse(found[0].decorator_list[0])}, which does not exist where it "
            f"is trained; give the function without it"
        )
    if not any(_same(part, func.__code__) for part in code.co_consts if isinstance(part, CodeType)):
        raise _not_its_source(name, "it says something else")
    foreign = sorted(_used(code) - _known())
    if foreign:
        raise ConfigError(
            f"func: {name} uses {_list(foreign)}, which {'is' if len(foreign) == 1 else 'are'} defined outside of it "
            f"and not there where it is trained; import modules inside {name}, and hand values over with func_args"
        )
    return source


def _not_its_source(name: str, why: object) -> ConfigError:
    # IPython keeps a cell as lines, and takes some letters for their ends that Python does not.
    return ConfigError(
        f"func: the source of {name} that is found is not what it was made from: {why}. Cells of a notebook lose "
        f"letters such as U+2028, U+0085 and a form feed; write them as escapes (\\u2028), or define {name} in a file. "
        f"Some tools change functions, as pytest does with an assert: define {name} in a module that is left alone"
    )


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether both do the same, wherever they were written."""
    names = ("name", "argcount", "posonlyargcount", "kwonlyargcount", "names", "varnames", "cellvars", "freevars")
    kinds = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return (
        all(getattr(one, f"co_{name}") == getattr(other, f"co_{name}") for name in names)
        and one.co_flags & kinds == other.co_flags & kinds
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_same_constant, _constants(one), _constants(other)))
        and list(_steps(one)) == list(_steps(other))
    )


def _steps(code: CodeType) -> Iterator[tuple[str, Any]]:
    """What it does. How a method is called depends on what the module around it imports, and where jumps go on that."""
    for step in dis.get_instructions(code):
        if step.opname in ("PUSH_NULL", "NOP", "EXTENDED_ARG"):
            continue
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            yield step.opname, None
        elif step.opcode in dis.hasconst:
            yield step.opname, step.arg
        else:
            yield "LOAD_ATTR" if step.opname == "LOAD_METHOD" else step.opname, step.argval


def _constants(code: CodeType) -> Iterator[Any]:
    """Its constants but for the one that tells in what it was written: the body of a class knows that."""
    place = code.co_qualname if "__qualname__" in code.co_names else None
    yield from ("its place" if isinstance(value, str) and value == place else value for value in code.co_consts)


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same_constant, one, other))
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return {(type(value), repr(value)) for value in one} == {(type(value), repr(value)) for value in other}
    return type(one) is type(other) and repr(one) == repr(other)  # 0.0 is not -0.0


def _known() -> set[str]:
    return (set(dir(builtins)) - _NOTEBOOK) | _MODULE


def _used(code: CodeType) -> set[str]:
    """Names that a module takes from outside of itself."""
    loaded: set[str] = set()
    stored: set[str] = set()
    for part in _parts(code):
        outermost = part is code
        for step in dis.get_instructions(part):
            if step.opname == "LOAD_GLOBAL" or (step.opname == "LOAD_NAME" and outermost):
                loaded.add(step.argval)
            elif step.opname == "LOAD_NAME":  # in the body of a class: its own names, or outer ones
                loaded |= {step.argval} - _stored_in(part)
            elif step.opname == "STORE_GLOBAL" or (step.opname == "STORE_NAME" and outermost):
                stored.add(step.argval)
    return loaded - stored


def _stored_in(code: CodeType) -> set[str]:
    class_names = {"__module__", "__qualname__", "__annotations__"}
    return class_names | {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _checked_arguments(func: Any, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ConfigError(f"func_args: {_shown(arguments)} is not accepted; it must be a dictionary")
    given = dict(arguments or {})
    for key, value in given.items():
        _check_value(f"func_args[{key!r}]", value)
    try:
        inspect.signature(func).bind(**given)
    except TypeError as error:
        raise ConfigError(
            f"func_args: {func.__name__}{inspect.signature(func)} cannot be called with them: {error}"
        ) from None
    return given


def _check_value(where: str, value: Any) -> None:
    """Values that mean the same everywhere; a pickle of anything else could need code that is not there."""
    if type(value) in _PLAIN:
        return
    if type(value) in (list, tuple, set, frozenset):
        for index, item in enumerate(value):
            _check_value(f"{where}[{index}]", item)
        return
    if type(value) is dict:
        for key, item in value.items():
            _check_value(f"a key of {where}", key)
            _check_value(f"{where}[{key!r}]", item)
        return
    raise ConfigError(
        f"{where}: {_shown(value)} is not accepted; it must be a text, a number, true or false, None, or a list, "
        f"tuple, set or dictionary of such"
    )


def _shown(value: Any) -> str:
    return f"{str(value)[:60]!r} of type {type(value).__name__}"


def _list(names: Any) -> str:
    return ", ".join(sorted(names)[:5])
