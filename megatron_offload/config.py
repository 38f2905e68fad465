"""What a user may set, read strictly from YAML, ``key=value`` and the environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from megatron_offload.core.policy_config import (
    AutoConfig,
    MemoryTargetConfig,
    ModulesConfig,
    PolicyConfig,
)
from megatron_offload.core.row_config import LOSS, MODEL, RowConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError, did_you_mean, shorten
from megatron_offload.files.strict_model import (
    BytesField,
    Converted,
    NamesField,
    OptionalBytesField,
    StrictModel,
    default,
)
from megatron_offload.files.strict_yaml import MAX_DEPTH, MAX_YAML_BYTES, parse_yaml
from megatron_offload.files.text import read_text

LAYER_INPUT = "layer_input"
"""Name of the groups of what checkpoints of Megatron's full recompute keep."""

MEGATRON_MODULES: tuple[str, ...] = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
    LAYER_INPUT,
)
"""Names that Megatron-core's own call sites mark, and the last its checkpoints, once installed."""

EXTRA_MODULES = ("mlp_fc1", "mlp_act", "mlp_fc2", "expert_fc2", "shared_experts", "router", "layer")
"""Names that this package adds, reached by module hooks (`megatron_offload.frontends.modules`)."""

MODULES: tuple[str, ...] = MEGATRON_MODULES + EXTRA_MODULES

RECOMPUTE_SITES: tuple[str, ...] = ("layer", "mlp", "attention")
"""What is recomputed as a whole: a layer, or its MLP or attention."""

MEGATRON_RECOMPUTE: tuple[str, ...] = ("norm", "mlp_act")
"""What is recomputed in a Megatron job unless something is set: its classes are known, and so is
who reads what they make."""

RECOMPUTE_KINDS = (*RECOMPUTE_SITES, *MEGATRON_RECOMPUTE, LOSS)
"""What backward can recompute by name, other than modules (docs/recompute.md)."""

_KEEP_KEYS = {"fraction", "delta_bytes_across_pp_ranks"}
"""Keys by which groups are kept on the device."""

_INSTEAD_OF_ROWS = {"modules", "recompute", "policy", *_KEEP_KEYS}

CopyTiming = Literal["eager", "late", "eager_d2h_late_h2d", "late_d2h_eager_h2d", "random"]


class SimulatedConfig(StrictModel):
    """The simulated device, used where there is no GPU."""

    copy_timing: CopyTiming = "late"
    """When a queued copy really happens: at once, as late as any wait allows, or in between."""

    seed: int = 0
    """Seed of ``copy_timing: random``."""

    d2h_gbps: float = Field(default=40.0, gt=0)
    """Virtual device-to-host bandwidth, in 10^9 bytes a second."""

    h2d_gbps: float = Field(default=40.0, gt=0)
    """Virtual host-to-device bandwidth, in 10^9 bytes a second."""

    poison: bool = True
    """Overwrite fresh and freed memory, so that a read at a wrong time can't go unnoticed."""

    check_hazards: bool = True
    """Keep a vector clock per stream and name the missing wait behind any unordered access."""

    host_time: bool = False
    """Let the virtual compute stream work for as long as the program really takes between two calls
    of the engine: for timelines of real programs, which then differ a little from run to run."""


class OffloadConfig(StrictModel):
    """What is offloaded, how late it is released, and how far ahead reloaded. Sizes in bytes."""

    enabled: bool = True
    """Whether anything is offloaded at all. Else nothing is recorded."""

    modules: NamesField = default(("core_attn", "attn_proj"))
    """Which groups are offloaded: names out of `MODULES`, or patterns of names holding a dot or
    ``*``. The trainer marks these. Otherwise a group is kept whose name is not among them, if they
    were set."""

    recompute: NamesField = default(())
    """What backward recomputes in place of offloading it: kinds out of `RECOMPUTE_KINDS`, and
    modules by patterns of names holding a dot or ``*``. Where it isn't set nothing is, but for the
    loss of a transformers model on a GPU where that takes no time, and `MEGATRON_RECOMPUTE` in a
    Megatron job, once installed; ``()`` is nothing there too."""

    rows: Converted[
        tuple[RowConfig, ...] | None,
        Sequence[RowConfig | Mapping[str, Any]] | Mapping[str, Any] | None,
    ] = default(None)
    """What is done at which sites of which layers (docs/rows.md), in place of all other keys that
    say what is offloaded or recomputed. What no row names is kept, without any cost; so is all
    where the list is given and empty."""

    fraction: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of each chunk's groups that is offloaded, earliest first."""

    min_tensor_bytes: BytesField = default(1024 * 1024)
    """Blocks smaller than this are kept on the device."""

    min_tensor_elements: int = Field(default=0, ge=0)
    """The same in elements: Megatron's ``--min-offloaded-tensor-size``. Both must hold."""

    delta_bytes_across_pp_ranks: BytesField = default(0)
    """Pipeline rank r keeps r times this many bytes on the device: later ranks need less relief."""

    max_inflight_bytes: OptionalBytesField = default(None)
    """Device memory for groups whose copy to the host is issued. Larger hides slower copies;
    smaller frees memory sooner. What of ``prefetch_bytes`` is not in use is added. None: an eighth
    of what the largest step so far has saved at its peak, offloaded or kept, and at least
    the largest group that is offloaded; and a copy is waited for at the latest when so much has
    been saved since, by groups that are kept too, as both limits make up. So a small share frees
    its memory as well."""

    prefetch_bytes: OptionalBytesField = default(None)
    """Device memory for groups that are reloaded and not yet consumed. One group is always allowed.
    None: an eighth likewise, and at least twice the largest group that is offloaded."""

    host_memory_bytes: OptionalBytesField = default(None)
    """Cap of the host memory that a manager pins, of which a process mostly has one. Over it
    tensors are kept on the device. None: what ``host_memory_share`` says."""

    host_memory_share: float = Field(default=0.5, gt=0.0, le=1.0)
    """The same as a share of what the machine and its control groups have free at the start, for
    all local ranks together, whatever started them. ``host_memory_bytes`` wins where it is set."""

    host_slab_bytes: Annotated[BytesField, Field(ge=4096)] = default(256 * 1024**2)
    """Pinned host memory is taken in slabs of at least this size."""

    pin_memory: bool = True
    """Page-lock host memory. Without, copies are slow and the host waits for each."""

    copy_streams: bool = True
    """Copy on streams of their own. Without, on the compute stream, where nothing overlaps."""

    policy: Converted[PolicyConfig | None, PolicyConfig | Mapping[str, Any] | str | None] = Field(
        default=default(None), discriminator="kind"
    )
    """What decides about marked groups, in place of ``fraction`` and the delta above:
    ``kind: ratio`` offloads a share of the bytes, ``memory_target`` and ``auto`` find rows by the
    run's own steps (docs/rows.md). ``kind: modules`` leaves all to those keys. A kind alone
    (``policy: modules``) will do where it needs no more. None: likewise where those keys or
    ``recompute`` are set, or where the program marks groups itself; else ``auto``."""

    whole_step_graph: bool = False
    """Steps will be replays of a CUDA graph (docs/cuda_graphs.md), in which the host takes no time:
    plans that a run makes by its eager steps are then for what the device takes by itself."""

    backend: Literal["auto", "cuda", "simulated"] = "auto"
    """Where tensors live: ``auto`` takes CUDA where there is a device, else the simulation."""

    checking: bool = False
    """Compare a checksum of every block before it leaves with one after it has been reloaded, and
    report at the end of each step which groups still hold memory. The host waits for each block, so
    this is for finding faults; docs/design.md says what it costs."""

    nvtx: bool = False
    """Put an NVTX range with the group's name around the issue of its copies, for Nsight."""

    simulated: SimulatedConfig = SimulatedConfig()

    @field_validator("policy", mode="before")
    @classmethod
    def _section_of(cls, policy: Any) -> Any:
        return {"kind": policy} if isinstance(policy, str) else policy

    @field_validator("rows", mode="before")
    @classmethod
    def _rows_of(cls, rows: Any) -> Any:
        if rows is None:
            return None
        given = rows if isinstance(rows, (list, tuple)) else [rows]
        read = [parse_yaml(row) if isinstance(row, str) else row for row in given]
        # A text may hold several, as a run says them.
        return [row for one in read for row in (one if isinstance(one, list) else [one])]

    @field_validator("modules")
    @classmethod
    def _known_modules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            raise ConfigError(
                "no name, so nothing would be offloaded; leave it out, or say enabled: false"
            )
        module_patterns(names)
        return names

    @field_validator("recompute")
    @classmethod
    def _known_units(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        recompute_patterns(names)
        return names

    def model_post_init(self, _: Any, /) -> None:
        """Refuse two keys that both say what is kept."""
        given = self.model_fields_set
        for key in sorted(given & _INSTEAD_OF_ROWS if self.rows is not None else ()):
            raise ConfigError(f"rows say what is offloaded and recomputed, and so does {key!r}")
        sites = {row.site for row in self.rows or ()}
        if MODEL in sites and not sites <= {MODEL, LOSS}:
            raise ConfigError("a row of the site 'model' offloads all, and so leaves no other row")
        named = recompute_patterns(self.recompute)
        if named and isinstance(self.policy, (AutoConfig, MemoryTargetConfig)):
            raise ConfigError(
                f"policy {self.policy.kind!r} chooses among kinds of what may be recomputed, and "
                f"{named[0]!r} names modules; 'rows' do that (docs/rows.md)"
            )
        if self.policy is not None and not isinstance(self.policy, ModulesConfig):
            for key in sorted(given & _KEEP_KEYS):
                raise ConfigError(
                    f"policy {self.policy.kind!r} says what is kept, and so does {key!r}; give one "
                    "of them"
                )

    @property
    def tuned_policy(self) -> AutoConfig | MemoryTargetConfig | None:
        """What the run's own steps are to find; None where the settings say what is offloaded."""
        if not self.enabled or self.rows is not None:
            return None
        if isinstance(self.policy, (AutoConfig, MemoryTargetConfig)):
            return self.policy
        is_open = self.policy is None and not self.model_fields_set & _KEEP_KEYS
        is_open &= self.copy_streams and self.pin_memory  # else copies are no waits
        return AutoConfig(kind="auto") if is_open and set(self.recompute) <= {LOSS} else None

    def plan(self, *, is_open: bool) -> str:
        """Return in a line what is done; where it ``is_open`` what is offloaded, it is found."""
        if self.rows is not None:
            return f"rows: [{', '.join(map(str, self.rows))}]"
        policy = self.tuned_policy if is_open else None
        if policy is None:
            again = f"recompute: [{', '.join(self.recompute)}]" if self.recompute else ""
            if again and not self.fraction:
                return f"{again} from the first step on, and nothing is offloaded"
            what = "what is marked, or saved in a context, is offloaded from the first step on"
            return f"{what}, within the shares and limits that are set{again and f'; {again}'}"
        if isinstance(policy, AutoConfig):
            limit = f"costs at most {policy.most_slowdown_percent:g} % of a step"
        else:
            target = policy.memory_target  # which may have too few ranks; others refuse that
            sizes = map(format_bytes, [target] if isinstance(target, int) else target)
            limit = f"lets at most {', '.join(sizes)} be reserved"
        looked = f"policy {policy.kind}: some 20 to 80 steps are looked at"
        return f"{looked}, then what is offloaded and recomputed {limit}"

    def without_offload(self) -> OffloadConfig:
        """Return the same, but where only ``recompute`` says what is done, nothing is offloaded."""
        given = self.model_fields_set & {"policy", "rows", *_KEEP_KEYS}
        is_said = set(self.recompute) <= {LOSS} or given
        found = self if is_said else self.model_copy(update={"fraction": 0.0})
        if not is_said:
            found.model_fields_set.discard("fraction")  # the user hasn't set it
        return found

    @property
    def has_loss_by_rows(self) -> bool:
        """Whether a model's own loss may be computed by rows, at doors that know it."""
        is_open = "recompute" not in self.model_fields_set and self.rows is None
        return self.enabled and (is_open or self.names_loss)

    @property
    def names_loss(self) -> bool:
        """Whether it says that the loss is computed by rows."""
        return LOSS in self.recompute or any(row.by_rows for row in self.rows or ())

    def smallest_tensor(self, given_elements: int | None = None) -> tuple[int, int]:
        """Return the smallest tensor that is offloaded, in bytes and in elements; both hold.

        Where only the elements were set, the bytes' default does not limit them; what the caller's
        model has ``given`` counts where neither was.
        """
        keys = {"min_tensor_bytes", "min_tensor_elements"} & self.model_fields_set
        if given_elements is not None and not keys:
            return 0, given_elements
        least_bytes = 0 if keys == {"min_tensor_elements"} else int(self.min_tensor_bytes)
        return least_bytes, self.min_tensor_elements


def module_patterns(names: Collection[str]) -> tuple[str, ...]:
    """Return which of these are patterns of modules' names; the others are in `MODULES`."""
    other = "a group of another name, or a module of the model's own,"
    return _patterns(names, MODULES, "unknown offload module", other)


def recompute_patterns(names: Collection[str]) -> tuple[str, ...]:
    """Return which of these say what is recomputed by modules' names; the others are kinds."""
    return _patterns(names, RECOMPUTE_KINDS, "unknown recompute kind", "a module")


def _patterns(
    names: Collection[str], known: Sequence[str], unknown: str, other: str
) -> tuple[str, ...]:
    patterns = tuple(name for name in names if "." in name or "*" in name)
    for name in names:
        if name not in known and name not in patterns:
            raise ConfigError(
                f"{unknown} {name!r}{did_you_mean(name, known)}; {other} is meant by a pattern "
                f"such as '*{name}'"
            )
    return patterns


def find_config(given: str | Path, *, kind: str = "") -> Path:
    """Return the file of ``--config`` or ``--model``: a path, or a name such as ``quickstart``.

    What exists, or has a suffix or a folder in it, is a path. Names are of files in the folder
    ``kind`` of the package's configurations.

    Raises:
        ConfigError: a name that neither is a file nor one of the package's.
    """
    path = Path(given)
    if path.suffix or len(path.parts) != 1 or (path.exists() and not path.is_dir()):
        return path
    known = {file.stem: file for file in sorted(config_folder(kind).glob("*.yaml"))}
    if path.name not in known:
        raise ConfigError(
            f"there is no file {shorten(path.name)!r}, and no configuration of that name; "
            f"names are {', '.join(known)}"
        )
    return known[path.name]


def config_folder(kind: str = "") -> Path:
    """Return the folder of the package's configurations, or one in it."""
    package = Path(__file__).parent
    inside = package / "configs"  # of an installed package; a checkout has them beside it
    return (inside if inside.is_dir() else package.parent / "configs") / kind


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping of plain values, each key once.

    Raises:
        ConfigError: the file is missing, unreadable, not plain YAML, or not a mapping.
    """
    text = read_text(path, limit_bytes=MAX_YAML_BYTES)
    try:
        data = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path} is not plain YAML: {error}") from error
    if data is not None and not isinstance(data, dict):
        raise ConfigError(
            f"{path} must hold a mapping of keys to values, got a {type(data).__name__}"
        )
    return data or {}


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set ``section.key=value`` pairs in a nested mapping; values are read as plain YAML.

    Raises:
        ConfigError: a pair without ``=``, an empty key, or a value that is not plain YAML.
    """
    result: dict[str, Any] = dict(data)
    for item in overrides:
        key, separator, text = item.partition("=")
        *sections, last = parts = key.strip().split(".")
        if not separator or not all(parts) or len(parts) > MAX_DEPTH or not key.isprintable():
            raise ConfigError(
                f"a setting is key=value or section.key=value, got {shorten(repr(item))}"
            )
        key, section = shorten(key), result
        for part in sections:
            inner = section.get(part) or {}
            inner = {"kind": inner} if part == "policy" and isinstance(inner, str) else inner
            if not isinstance(inner, dict):
                raise ConfigError(f"{key}: {part!r} is a value, not a section")
            section[part] = section = dict(inner)
        try:
            section[last] = parse_yaml(text)
        except ConfigError as error:
            shown = shorten(repr(text))
            raise ConfigError(f"{key}: the value {shown} is not plain YAML: {error}") from error
    return result
