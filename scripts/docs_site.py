"""Hooks of mkdocs: pages of the site that are in no file of docs/, and links as the site has them.

README, CONTRIBUTING and CHANGELOG are pages; the reference is made from the models of the
configuration, the commands' help and the package's public names. Files outside of docs/ to
which a page links are part of the site. `mkdocs.yml` names this file; `make docs` builds the site.
"""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import megatron_offload
from megatron_offload.cli import main as cli
from megatron_offload.core.units import format_bytes

ROOT = Path(__file__).parent.parent

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the root that are pages."""

PLACES = {**PAGES, "megatron_offload/config.py": "reference/configuration.md"}
"""What stands for a file outside of docs/ to which pages link; the file itself unless named."""

API = [
    ("Integrations", "integrations.hugging_face.OffloadMixin"),
    ("Integrations", "integrations.lightning.OffloadCallback"),
    ("Integrations", "integrations.torch_pipelining.offload_pipeline"),
    ("Integrations", "integrations.torch_pipelining.PipelineOffload"),
    ("Integrations", "integrations.megatron_core.install"),
    ("Integrations", "integrations.megatron_moe.install"),
    ("Integrations", "integrations.transformer_engine.set_activation_offloading"),
    ("Steps and plans", "engine.stats.StepStats"),
    ("Steps and plans", "engine.stats.GroupStats"),
    ("Steps and plans", "autotune.row_search.RowSearch"),
    ("Steps and plans", "planning.description.load_description"),
]
"""What the pages use besides the names of the package itself."""

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_NAMED = re.compile(r"(?<=\[)`(docs/[\w/]+\.md)`(?=\])")
_PICTURE = re.compile(r'<img alt="[^"]*" src="(?:\.\./)*(images/\w+\.svg)" ?/?>')


# The reference


def configuration() -> str:
    """Return the page of every key of a run's configuration."""
    from megatron_offload.train.config import TrainConfig

    return (
        "# Configuration keys\n\n"
        "What a YAML file for `--config`, `--set KEY=VALUE` and flags of the same names may say. "
        "The section `offload` is also `OffloadConfig` in a program, and what "
        "`--offload-config` of `megatron-offload run` reads. "
        "[Which of them matter](../settings.md).\n\n" + "".join(_section(TrainConfig, ""))
    )


def description() -> str:
    """Return the page of every key of a described job."""
    from megatron_offload.planning.description import JobDescription

    return (
        "# Keys of a described job\n\n"
        "What a YAML file for `--model` of `megatron-offload plan` and `simulate` says "
        "about a job that need not run. [What is predicted from it](../simulation.md).\n\n"
        + "".join(_section(JobDescription, ""))
    )


def _section(model: type[BaseModel], prefix: str, title: str = "") -> Iterator[str]:
    sections: list[tuple[type[BaseModel], str, str]] = []
    if prefix:
        yield f"## `{title or prefix}`\n\n{_text(model.__doc__ or '')}\n\n"
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        inner = list(_models(field.annotation))
        if name != "kind" and (field.description or not inner):
            anchor = f"{key}.{_kind(model)}" if _kind(model) else key
            bounds = "".join(_bound(one) for one in field.metadata)
            value = (
                f"`{key}` {{ #{anchor} }}\n:   {_type(field.annotation)}{bounds}{_default(field)}"
            )
            yield f"{value}\n\n    {_text(field.description or '')}\n\n"
        for one in inner:
            kind = _kind(one) if len(inner) > 1 else ""
            sections.append((one, key, f"{key}, kind: {kind}" if kind else key))
    for section in sections:
        yield from _section(*section)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models(inner)


def _kind(model: type[BaseModel]) -> str:
    field = model.model_fields.get("kind")
    return typing.get_args(field.annotation)[0] if field else ""


def _type(annotation: Any) -> str:
    """Return a type in words."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        *more, last = (f"`{value}`" for value in inner)
        return f"{', '.join(more)} or {last}" if more else last
    if origin is typing.Annotated:
        return _type(inner[0])
    if origin in (typing.Union, types.UnionType):
        kinds = [_type(one) for one in inner if one is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin in (tuple, list):
        return f"list of {_type(inner[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {"ByteSize": "size", "bool": "true or false", "float": "number", "int": "integer"}
    name = getattr(annotation, "__name__", "any")
    return names.get(name) or {"str": "text", "Path": "path"}.get(name, "mapping")


def _bound(limit: Any) -> str:
    text = ""
    for name, sign in {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}.items():
        value = getattr(limit, name, None)
        if value is not None and value < 2**62:  # larger ones are no bounds to a user
            text += f", {sign} {value:,}" if isinstance(value, int) else f", {sign} {value:g}"
    return text


def _default(field: Any) -> str:
    value = field.default
    if field.is_required():
        return "; required"
    if value is None:
        return "; unset by default"
    if isinstance(value, BaseModel):
        return "; its own defaults"
    if isinstance(value, bool):
        return f"; default `{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"; default `[{', '.join(map(str, value))}]`"
    if "ByteSize" in str(field.annotation) and value:
        value = format_bytes(value).replace(".0 ", "")
    return f"; default `{value}`"


def _text(docstring: str) -> str:
    """Return a docstring as one paragraph, in which pages are links."""
    return re.sub(r"docs/(\w+)\.md", r"[this page](../\1.md)", " ".join(docstring.split()))


def commands() -> str:
    """Return the page of every command: what its ``--help`` says."""
    page = "# Commands\n\n"
    for name in cli.COMMANDS:
        with redirect_stdout(StringIO()) as said, suppress(SystemExit):
            cli.main([name, "--help"])
        page += f"## `{name}`\n\n```\n{said.getvalue()}```\n\n"
    return page


def python() -> str:
    """Return the page of the Python names, which mkdocstrings fills."""
    names = [("The package", f"{home}.{name}") for name, home in megatron_offload._HOMES.items()]
    page = "# Python API\n"
    for heading in dict.fromkeys(heading for heading, _ in names + API):
        page += f"\n## {heading}\n\n"
        for name in (name for one, name in names + API if one == heading):
            page += f"::: megatron_offload.{name}\n"
            if name == "config.OffloadConfig":
                page += "    options: {members: false, inherited_members: false}\n\n"
                page += "[Its keys](configuration.md#offload)\n\n"
    return page


REFERENCE: dict[str, Callable[[], str]] = {
    "reference/configuration.md": configuration,
    "reference/description.md": description,
    "reference/commands.md": commands,
    "reference/python.md": python,
}


# Links and files


def _targets(text: str, source: Path) -> Iterator[tuple[str, str]]:
    """Yield each link of a page that leads out of docs/, and the file that it means."""
    for link, _ in _LINK.findall(text):
        path = Path(os.path.normpath(source.parent / link))
        is_ours = path.is_relative_to(ROOT) and path.is_file()
        if is_ours and (source.parent == ROOT or not path.is_relative_to(ROOT / "docs")):
            yield link, path.relative_to(ROOT).as_posix()


def _in_site(path: str) -> str:
    return PLACES.get(path) or (path[5:] if path.startswith("docs/") else f"files/{path}")


def on_config(config: Any) -> Any:
    """Name headings as GitHub does, so that a link is right in both places."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add what is made, and what stands outside of docs/."""
    from mkdocs.structure.files import File

    for name, make in REFERENCE.items():
        files.append(File.generated(config, name, content=make()))
    for name, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    for page in list(files.documentation_pages()):
        if page.abs_src_path is None:
            continue
        source = Path(page.abs_src_path)
        for _, path in _targets(source.read_text(), source):
            place = _in_site(path)
            if place not in files.src_uris:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links to where the site has what they mean."""
    if page.file.abs_src_path is None:
        return markdown
    source = Path(page.file.abs_src_path)
    places = dict(_targets(markdown, source))

    def rewritten(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        if link not in places:
            return match[0]
        start = os.path.dirname(page.file.src_uri) or "."
        return os.path.relpath(_in_site(places[link]), start) + anchor

    def title(match: re.Match[str]) -> str:
        first = (ROOT / match[1]).read_text().partition("\n")[0]
        return first.removeprefix("# ")

    return _NAMED.sub(title, _LINK.sub(rewritten, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Put drawings into the page itself, where they take the colours of its palette."""
    return _PICTURE.sub(lambda match: (ROOT / "docs" / match[1]).read_text(), html)
