"""Mistakes on the command line, each told in one sentence: what is wrong, where, and which known names are nearest.

jsonargparse parses the arguments of a class by an inner parser, and wraps the inner parser's message in several lines
of its own. So every parser here reduces its message to (option, sentence) first, and passes the pair on, marked, inside
the message; the parser around it puts its own option in front and drops the wrapping.
"""

import inspect
import re
from argparse import ArgumentError
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, NoReturn, get_args, get_origin

LOST_PROCESS = (
    "another process of this run has ended or does not answer, so this one ends too; its own output says why, "
    "and fit --resume auto goes on from the last checkpoint"
)


class UsageError(Exception):
    """A mistake of the user; the message is the sentence to show."""


class SentenceErrors:
    """Mixed into a jsonargparse parser: raises UsageError where that prints several lines and exits."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        option, sentence = self._reduce(message, getattr(ex, "subcommand_parser", self))
        if self.exit_on_error:
            raise UsageError(f"{option}: {sentence}" if option else sentence) from None
        raise ArgumentError(None, f"\x02{option}\x1f{sentence}\x03")

    def validate(self, namespace: Any, **options: Any) -> None:
        """Also refuses null for arguments of a class whose type has none; to jsonargparse it means left out."""
        try:
            super().validate(namespace, **{"skip_unset": "_prefix" in options} | options)  # a subcommand has it
        except TypeError:
            super().validate(namespace, **options)  # what is missing altogether is better told so
            raise

    def parse_path(self, path: Any, *args: Any, **options: Any) -> Any:
        try:
            return super().parse_path(path, *args, **options)
        except UsageError as error:
            raise UsageError(f"{error} (in {path})") from None

    def _reduce(self, message: str, parser: Any) -> tuple[str, str]:
        """The option concerned ("" for none) and the sentence about it."""
        found = re.match(r'Parser key "(.+?)"', message)
        option = found[1] if found else ""
        if inner := re.search("\x02(.*?)\x1f(.*?)\x03", message, re.DOTALL):
            sentence = inner[2].replace(", give --", f", give --{option}.")
            return ".".join(filter(None, (option, inner[1]))), sentence
        for pattern, what in (
            (r"unrecognized arguments: --([^\s=]+)", "unknown option"),
            (r"unrecognized arguments: (\S+)", "unexpected argument"),
            (r"(?:Option|Subcommand '.+' does not accept option) '(.+?)'", "unknown option"),
            (r"Group '(.+)' does not accept option '(.+)'", "unknown option"),
        ):
            if found := re.search(pattern, message):
                name = ".".join(found.groups())
                return "", f"{what} {name}, {nearest(name, _options(parser))}"
        if found := re.search(r"Not a valid subclass of (\w+)\. Got value: None", message):
            return option, f"expected a {found[1]}, got null"
        if found := re.search(r"NestedArg\(key='(.+?)'", message):
            return "", f"{option}.{found[1]} is of no class yet, give --{option} or a --config file that has it first"
        if found := re.search(r"Expected a dot import path string: (\S*)", message):
            return option, f"unknown class {found[1]}, {nearest(found[1], _classes(parser, option))}"
        if found := re.search(r"Expected '(\S+)' to be a subclass of <class '(\w+)'>", message):
            return option, f"{found[1]} is not a {found[2]}, {nearest(found[1], _classes(parser, option))}"
        if found := re.search(r"the following arguments are required: (.+)", message):
            names = [name.partition(".")[2] if parser._subcommands_action else name for name in found[1].split(", ")]
            if any(action.dest == names[0] and not action.option_strings for action in parser._actions):
                return "", f"missing {names[0]}, see --help"
            return "", f"missing {' and '.join(names)}, give --{names[0]} or a --config file that has it"
        if found := re.search(r'Linked "(.+)" must be given via "(.+)"', message):
            return found[1], f"is taken from {found[2]} and cannot be given"
        if found := re.search(r"No module named '\S+'|module '\S+' has no attribute '\S+'", message):
            return option, f"cannot be imported: {found[0]}"
        given = re.search(r"(?:Got value|Given value): (.*)", message)
        expected = re.findall(r"Expected an? (.+?)(?:, but got|\. Got value|\n|$)", message)
        if given and expected:
            kinds = dict.fromkeys(_spoken(kind) for kind in expected if "path but" not in kind)
            got = "null" if given[1] == "None" else given[1]
            return option, f"expected {' or '.join(kinds)}, got {got}"
        return option, one_line(re.sub(r'^Parser key ".+?":|in "<unicode string>", ', "", message))


def about_other_processes(error: RuntimeError, joined: bool) -> str | None:
    """A sentence about an error of torch.distributed, None if it is another's.

    Args:
        error: what has been raised.
        joined: whether the processes had found each other before.
    """
    text = one_line(error)
    if not (type(error).__name__.startswith("Dist") or "gloo/transport" in text or "NCCL" in text):
        return None
    if joined:
        return f"{LOST_PROCESS} ({text[:200]})"
    return (
        "the processes of this run have not found each other; all must have the same MASTER_ADDR and MASTER_PORT, and "
        f"as many must be started as devices times num_nodes ({text[:200]})"
    )


def raised_in_union(text: str) -> str:
    """What the constructor of the last member has raised, of a text about all members of a union of types."""
    each = r"(?ms)^\s*- (?!Expected an? |Does not)(.+?)(?=\n\s*- |\nGiven value)"
    found = re.findall(each, text)
    return found[-1] if found else text


def one_line(text: object) -> str:
    """The text without its line breaks and indentation."""
    return " ".join(str(text).split())


def nearest(name: str, known: Iterable[str]) -> str:
    """Says which known names are nearest to an unknown one, or which there are if none is near and they are few."""
    known = list(dict.fromkeys(known))
    if close := get_close_matches(name, known, n=3, cutoff=0.6):
        return f"nearest known: {', '.join(close)}"
    return f"known: {', '.join(known)}" if 0 < len(known) <= 12 else "see --help"


def concrete_subclasses(base: type) -> list[type]:
    """The classes below and including `base` that can be built, by name."""
    found, waiting = set(), [base]
    while waiting:
        found.add(cls := waiting.pop())
        waiting += cls.__subclasses__()
    return sorted((cls for cls in found if not inspect.isabstract(cls)), key=lambda cls: cls.__name__)


def _options(parser: Any) -> list[str]:
    """Names of a parser's options, without the groups that they form."""
    names = [action.dest for action in parser._actions if not action.dest.endswith("help")]
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def _classes(parser: Any, option: str) -> list[str]:
    """Names of the classes that an option accepts."""
    hints = [getattr(action, "_typehint", None) for action in parser._actions if action.dest == option]
    return [cls.__name__ for hint in hints for base in _bases(hint) for cls in concrete_subclasses(base)]


def _bases(hint: Any) -> list[type]:
    """The classes in a type hint whose subclasses are accepted: what a factory returns, each member of a union."""
    if get_origin(hint) is Callable:
        return _bases(get_args(hint)[-1])
    if get_args(hint):
        return [base for part in get_args(hint) for base in _bases(part)]
    return [hint] if inspect.isclass(hint) and hint.__module__ != "builtins" else []


def _spoken(kind: str) -> str:
    """<class 'int'> as int, a typing.Literal as its values."""
    kind = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", kind)
    return re.sub(r"typing\.Literal\[(.+)\]", r"one of \1", kind).replace("NoneType", "null")
