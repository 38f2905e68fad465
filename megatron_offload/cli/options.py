"""How the words of a command line become a command's options.

A command's options are one model; of another, such as the trainer's configuration, each key is a
flag too, which says the same as ``--set KEY=VALUE``. pydantic-settings makes the flags of both.
Where commands write stands here too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticUndefined

from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.files.renames import RENAMED, current_name
from megatron_offload.files.strict_model import StrictModel, validate


class Options(StrictModel):
    """The options of a command: of a field ``memory_target`` the flag is ``--memory-target``."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"), validate_by_name=True
    )

    keys: ClassVar[type[BaseModel] | None] = None
    """A model whose keys are flags as well."""

    also: ClassVar[Mapping[str, str]] = {}
    """Other names of these flags, without a value where one says yes or no."""

    typed: Mapping[str, str] = {}
    """Flags, as they were typed, of the keys that they gave; itself no flag."""


class OptionsWithKeys(Options):
    """Options of a command that is configured by keys."""

    set: tuple[str, ...] = ()
    """Set keys; each of those below may be a flag as well."""


def _no_folder(path: Path) -> Path:
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; name a file")
    return path


OutputFile = Annotated[Path, AfterValidator(_no_folder)]
"""What a command writes in the end: a folder is refused before it does anything."""

Given = TypeVar("Given", bound=Options)

_METAVARS = {"Path": "FILE", "bool": "{true,false}", "float": "NUMBER", "int": "N", "str": "TEXT"}
_METAVARS |= {"dict[str,Any]": "JSON"}


def add_flags(parser: argparse.ArgumentParser, options: type[Options]) -> None:
    """Make flags of a model's fields and keys; where two have one name, the field's counts."""

    def add(place: Any, name: str, *_: str, **settings: Any) -> None:
        if settings["help"] == argparse.SUPPRESS or name == "--typed":
            return  # a whole section as JSON
        if settings.get("action") == "append":
            is_one_or_many = settings["metavar"].startswith("{")  # then many are YAML, in one word
            many = {"action": "extend", "nargs": "+"}
            settings |= {"action": "store"} if is_one_or_many else many
        if "metavar" in settings:
            kind = re.sub(r"(?:tuple|list)\[\{?(.*?)\}?(?:,\.\.\.)?\]", r"\1", settings["metavar"])
            settings["metavar"] = "SIZE" if "ByteSize" in kind else _METAVARS.get(kind, kind)
        if name == "--set":
            settings["metavar"] = "KEY=VALUE"
        if (other := options.also.get(name)) and settings.get("metavar") == _METAVARS["bool"]:
            settings |= {"nargs": "?", "const": "true"}
        place.add_argument(*filter(None, (name, other)), **settings)

    # What takes its time: not for --version.
    from pydantic_settings import CliSettingsSource

    for model in filter(None, (options.keys, options)):
        CliSettingsSource(
            cast(Any, model),
            root_parser=parser,
            add_argument_method=add,
            cli_avoid_json=True,
            cli_hide_none_type=True,
        )


def parse_known(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Return what words give; `ConfigError` names the flag nearest to one that is unknown."""
    found, unknown = parser.parse_known_args(map(_current_flag, words))
    if unknown:
        flag = unknown[0].partition("=")[0]
        near = did_you_mean(flag, parser._option_string_actions) if flag.startswith("-") else ""
        raise ConfigError(f"unrecognized arguments: {' '.join(unknown)}{near}")
    return found


def _current_flag(word: str) -> str:
    flag, equals, value = word.partition("=")
    is_old = re.split(r"[.]|^--", flag)[-1] in RENAMED and flag.startswith("--")
    return current_name(flag) + equals + value if is_old else word


def read_options(
    model: type[Given], parser: argparse.ArgumentParser, words: Sequence[str]
) -> Given:
    """Return the options that words give; `ConfigError` says what is unknown or wrong."""
    found = parse_known(parser, words)
    given = {name: value for name, value in vars(found).items() if value is not PydanticUndefined}
    own = {name: given.pop(name) for name in list(given) if "." not in name}
    actions, heads = parser._option_string_actions, (word.partition("=")[0] for word in words)
    flags = {actions[name].dest: one for one in heads if (name := _current_flag(one)) in actions}
    keys = (item.partition("=")[0].strip() for item in own.get("set", ()))
    typed = {key: f"--set {key}" for key in keys} | {key: flags[key] for key in given}
    if given:
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in given.items()}
        own["set"] = [*own.get("set", ()), *(f"{key}={text}" for key, text in texts.items())]
    return validate(model, own | {"typed": typed}, "command line", flags)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make a file's folder; what the operating system refuses is a `ConfigError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}; choose another file") from error
