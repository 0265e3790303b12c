"""A command line: its arguments, the flags that are typed, their ranges, the screen of --help."""

import argparse
import os
import sys
import textwrap
import warnings
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import tyro
from annotated_types import Ge, Gt, Le, Lt

HELP_COLUMN = 32  # where the texts of --help begin


def expanded_arguments() -> list[str]:
    """The arguments of this process, with `~` as the home folder wherever a path may begin: a shell
    leaves it as it is behind `=`, behind a comma and in quotes. SystemExit where no home folder is
    known."""
    arguments: list[str] = []
    for argument in sys.argv[1:]:
        prefix = ""
        value = argument
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            prefix = name + equals
        paths = [os.path.expanduser(path) for path in value.split(",")]
        if any(path == "~" or path.startswith("~/") for path in paths):
            raise SystemExit(f"{argument}: there is no home folder")
        arguments.append(prefix + ",".join(paths))
    return arguments


def typed_flags() -> set[str]:
    """All arguments as flags: `=VALUE` cut off, `_` as `-`. Separate values are among them."""
    return {argument.partition("=")[0].replace("_", "-") for argument in sys.argv[1:]}


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flat(args: Any) -> dict[str, Any]:
    """{name: value} of all flags, those of groups last."""
    flags: dict[str, Any] = {}
    flags_of_groups: dict[str, Any] = {}
    for item in fields(args):
        value = getattr(args, item.name)
        if is_dataclass(value):
            flags_of_groups.update(flat(value))
        else:
            flags[item.name] = value
    return flags | flags_of_groups


def switches(args: Any) -> set[str]:
    """The flags that take no value."""
    names: set[str] = set()
    for name, hint in get_type_hints(type(args)).items():
        value = getattr(args, name)
        if is_dataclass(value):
            names |= switches(value)
        elif bool in (hint, *get_args(hint)):
            names.add(flag(name))
    return names


def refuse_broken_line(arguments: list[str]) -> None:
    """SystemExit for the arguments that another launcher adds, and for those that a badly continued
    line or an unset variable leaves behind."""
    for argument in arguments:
        if argument.replace("_", "-").startswith("--local-rank"):
            raise SystemExit(
                "--local-rank is what python -m torch.distributed.launch and deepspeed add: "
                "take torchrun"
            )
    if any(argument.isspace() for argument in arguments):
        raise SystemExit(
            "a lone space is an argument: a backslash that continues a line must be its last "
            "character"
        )
    pairs = with_values(arguments)
    for name, value in pairs:
        if value == "" and not name.startswith("--"):
            raise SystemExit(f"an empty argument stands behind {name}: an unset variable?")
        if value == "" and name.replace("_", "-") not in ("--tools", "--log"):
            raise SystemExit(f"{name} is empty: an unset variable?")
    for name, value in pairs:
        has_value = value is not None and not value.startswith("--")
        if name.replace("_", "-") in ("--train-data", "--eval-data") and not has_value:
            raise SystemExit(f"{name} is followed by no file: an unset variable?")


def with_values(arguments: list[str]) -> list[tuple[str, str | None]]:
    """Each argument with the text behind its `=`, or else with the next one; None at the end."""
    pairs: list[tuple[str, str | None]] = []
    for argument, following in zip(arguments, [*arguments[1:], None]):
        name, equals, value = argument.partition("=")
        pairs.append((name, value if equals else following))
    return pairs


def check_ranges(args: Any) -> None:
    """SystemExit for a number outside the range that its type gives, in a group or beside it."""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        if is_dataclass(value):
            check_ranges(value)
        elif isinstance(value, tuple):
            for number, number_hint in zip(value, get_args(hint), strict=True):
                check_range(flag(name), number, number_hint)
        elif isinstance(value, int | float):
            check_range(flag(name), value, hint)


def check_range(flag_name: str, value: float, hint: Any) -> None:
    """SystemExit for a number outside the range that its type gives, or one type of a union."""
    if value != value:  # NaN
        raise SystemExit(f"{flag_name} {value}: must be a number")
    for part in (hint, *get_args(hint)):  # the type itself, or the types of a union
        for bound in getattr(part, "__metadata__", ()):
            problem = ""
            if isinstance(bound, Gt) and not value > bound.gt:
                problem = f"must be above {bound.gt:g}"
            elif isinstance(bound, Ge) and not value >= bound.ge:
                problem = f"must not be below {bound.ge:g}"
            elif isinstance(bound, Le) and not value <= bound.le:
                problem = f"must not be above {bound.le:g}"
            elif isinstance(bound, Lt) and not value < bound.lt:
                problem = f"must be below {bound.lt:g}"
            if problem:
                raise SystemExit(f"{flag_name} {value}: {problem}")


def refuse_idle(flags: Any, uses: dict[str, tuple[bool, str]]) -> None:
    """SystemExit if a flag is given that has no effect.

    uses: {field of `flags`: (whether it has an effect, what it needs for one)}.
    """
    for name, (is_used, needs) in uses.items():
        spellings = {flag(name), flag(f"no-{name}")}
        if spellings & typed_flags() and not is_used:
            value = getattr(flags, name)
            raise SystemExit(f"{flag(name)} {value} has no effect: needs {needs}")


def title_and_commands(doc: str) -> str:
    """The first line of a script's docstring, and the paragraphs of it that are commands."""
    title, *paragraphs = doc.split("\n\n")
    commands = [text for text in paragraphs if text.startswith("    ")]
    return "\n\n".join([title.partition("\n")[0], *commands])


def help_screen(args_class: type, doc: str, groups: list[str]) -> str:
    """Title, commands, and groups of flags with their defaults and the first part of their help, in
    80 columns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # requirements.txt pins tyro
        parser = tyro.extras.get_parser(tyro.conf.OmitArgPrefixes[args_class], default=args_class())
    actions = {action.option_strings[0]: action for action in parser._actions}
    defaults = flat(args_class())
    lines = [title_and_commands(doc)]
    for group in groups:
        lines.append("")
        for name in group.split():
            lines += help_lines(actions[f"--{name}"], defaults[name.replace("-", "_")])
    return "\n".join([*lines, "", "--help-all: all flags, with their whole help"])


def help_lines(action: argparse.Action, default: Any) -> list[str]:
    """A flag with its default, and what its help says before the first semicolon."""
    left = f"  {action.option_strings[0]}"
    if isinstance(default, float):
        left += f" {default:g}"
    elif default is None or default == "":
        left += f" {action.metavar.removeprefix('{None}|')}"
    elif not isinstance(default, bool):
        left += f" {default}"
    text = action.help.rpartition(" (default: ")[0].partition("; ")[0]
    if action.metavar and "," in action.metavar:  # {one,or,another}
        choices = action.metavar.strip("{}").replace(",", ", ")
        text += f" ({choices})"
    lines = textwrap.wrap(text, width=80 - HELP_COLUMN, break_on_hyphens=False)
    indented = [" " * HELP_COLUMN + line for line in lines]
    if not lines or len(left) >= HELP_COLUMN:  # no help, or a long flag or default of a fork
        return [left, *indented]
    return [left.ljust(HELP_COLUMN) + lines[0], *indented[1:]]
