"""Recipes: one YAML tree that says which rotations, formats and exceptions a conversion uses.

All that needs no model is checked when it is read: an unknown key, a wrong value or a malformed file is a `ValueError`
that gives the file, the line, what is allowed and, where one is close, the word that was probably meant.
"""

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from quantrot.kernels.fp8 import Fp8ScaleRule
from quantrot.kernels.mxfp4 import ScaleRule

SHIPPED = Path(__file__).parent / "recipes"
MAX_BYTES = 1 << 20

RotationName = Literal["R1", "R2", "R3", "R4"]
ROTATIONS: tuple[RotationName, ...] = get_args(RotationName)
ONLINE: tuple[RotationName, ...] = ("R3", "R4")  # executed at run time; R1 and R2 are fused into weights
Arithmetic = Literal["bf16", "fp8"]  # of attention
KVCache = Literal["bf16", "fp8", "int4"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RotationSpec(Strict):
    """One rotation: which matrix, on the full width or in blocks, from which seed."""

    kind: Literal["none", "hadamard", "random-hadamard", "random-orthogonal", "learned"] = Field(
        description="which orthogonal matrix; none: no rotation; learned: out of the rotations' `path`"
    )
    block: int | str = Field(
        "full",
        description="full width, a block's width (1 only folds norms), or '<=32': the largest up to 32 that divides it "
        "and has a Hadamard matrix",
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 63, strict=True)] = Field(0, description="of the random kinds")
    channels: Literal["natural", "by-gain"] = Field(
        "natural", description="R1 only; by-gain: blocks of channels whose norm gains are alike in every layer"
    )

    @field_validator("block", mode="before")
    @classmethod
    def _known_block(cls, block: Any) -> Any:
        bounded = isinstance(block, str) and re.fullmatch(r"<=[1-9][0-9]{0,5}", block)
        if block != "full" and not bounded and (type(block) is not int or not 1 <= block < 1 << 31):
            raise ValueError(
                f"block is {_shown(block)}; allowed: full, or a whole number from 1 up, or a bound as '<=32'"
            )
        return block


NO_ROTATION = RotationSpec(kind="none")


class Rotations(Strict):
    """R1 residual stream (fused), R2 value heads (fused), R3 queries and keys (online), R4 down_proj input (online)."""

    R1: RotationSpec = NO_ROTATION
    R2: RotationSpec = NO_ROTATION
    R3: RotationSpec = NO_ROTATION
    R4: RotationSpec = NO_ROTATION
    path: str = Field("", description="the file of the learned ones, from `quantrot learn`; beside the recipe")

    @property
    def learned(self) -> tuple[RotationName, ...]:
        """The rotations that are read from `path`."""
        return tuple(name for name in ROTATIONS if getattr(self, name).kind == "learned")

    @model_validator(mode="after")
    def _consistent(self) -> "Rotations":
        for name in ("R2", "R3", "R4"):
            if getattr(self, name).channels != "natural":
                raise ValueError(f"{name}.channels is by-gain, which R1 alone can have: only it turns what norms scale")
        for name in ONLINE:
            kind = getattr(self, name).kind
            if kind != "none" and getattr(self, name).block == 1:
                raise ValueError(f"{name}.block is 1, which turns nothing and folds no norm; use kind: none")
            if kind in ("random-orthogonal", "learned"):
                raise ValueError(
                    f"{name} runs online, where {kind} is a dense product; use hadamard or random-hadamard"
                )
        if self.learned and not self.path:
            given = "empty" if "path" in self.model_fields_set else "missing"
            raise ValueError(f"{self.learned[0]} is learned and path is {given}; name the file of `quantrot learn`")
        if self.path and not self.learned:
            raise ValueError(f"path is {_shown(self.path)} and no rotation is of kind learned; give one that kind")
        return self


class Rounded(Strict):
    """How weights of any format are rounded: each to nearest, or so that their errors cancel on a text's inputs."""

    rounding: Literal["nearest", "gptq"] = Field("nearest", description="gptq: calibrated, needs a text")


REQUIRED: dict[str, list[Any]] = {  # fields that have no default
    "weights.block": ["channel", (128, 128), (256, 256)],
    "weights.group": ["channel", 64, 128],
    "activations.block": ["token", (1, 128), (1, 256), (128, 128), (256, 256)],
}


STORED = [rule.value for rule in ScaleRule if rule is not ScaleRule.absmax34]


def _storable(rule: Any) -> Any:
    if rule == ScaleRule.absmax34:
        raise ValueError(
            "scale_rule absmax34 holds 3/4 of each value and is for the backward pass of training: no checkpoint "
            f"format records the factor that makes up for it. Allowed: {', '.join(STORED)}"
        )
    return _one_of("scale_rule", rule, STORED)


StoredRule = Annotated[ScaleRule, BeforeValidator(_storable), WithJsonSchema({"type": "string", "enum": STORED})]


class Fp8Weights(Rounded):
    """e4m3 with one float32 scale a block; `channel` is one scale an output feature and fits any shape."""

    format: Literal["fp8"]
    block: tuple[int, int] | Literal["channel"]
    scale_rule: Fp8ScaleRule = Fp8ScaleRule.bf16
    fallback: Literal["channel", "keep"] = Field("channel", description="for a shape that the block does not divide")

    @field_validator("block", mode="before")
    @classmethod
    def _known_block(cls, block: Any) -> Any:
        return _one_of("block", block, REQUIRED["weights.block"])


class Mxfp4Weights(Rounded):
    """MXFP4: groups of 32 along in_features share an e8m0 scale."""

    format: Literal["mxfp4"]
    scale_rule: StoredRule = ScaleRule.mse
    fallback: Literal["keep"] = Field("keep", description="for in_features that are no multiple of 32")


class Int8Weights(Rounded):
    """Symmetric int8, one bfloat16 scale per group of in_features or per channel."""

    format: Literal["int8"]
    group: Literal[64, 128, "channel"]
    fallback: Literal["channel", "keep"] = Field(
        "channel", description="for in_features that the group does not divide"
    )


class NoActivations(Strict):
    """Activations stay in the model's dtype (weight-only)."""

    format: Literal["none"]


class Fp8Activations(Strict):
    """e4m3, scaled at run time per block [tokens, features]; `token` is one scale a token."""

    format: Literal["fp8"]
    block: tuple[int, int] | Literal["token"]
    scale_rule: Fp8ScaleRule = Fp8ScaleRule.exact

    @field_validator("block", mode="before")
    @classmethod
    def _known_block(cls, block: Any) -> Any:
        return _one_of("block", block, REQUIRED["activations.block"])


class Mxfp4Activations(Strict):
    """MXFP4, scaled at run time per token and group of 32 features."""

    format: Literal["mxfp4"]
    scale_rule: StoredRule = ScaleRule.even


Weights = Annotated[Union[Fp8Weights, Mxfp4Weights, Int8Weights], Field(discriminator="format")]  # noqa: UP007
Activations = Annotated[
    Union[NoActivations, Fp8Activations, Mxfp4Activations],  # noqa: UP007
    Field(discriminator="format", json_schema_extra=lambda schema: schema["oneOf"].append({"const": "none"})),
    BeforeValidator(lambda given: {"format": "none"} if given == "none" else given),
]

PAIRS = {"fp8": ("none", "fp8"), "mxfp4": ("none", "fp8", "mxfp4"), "int8": ("none",)}


class Rule(Strict):
    """Linears that `match` names get these formats. `hadamard`: an online block Hadamard on each one's input."""

    match: str = Field(min_length=1, description="down_proj, self_attn.q_proj, a full name, or a glob over any of them")
    weights: Weights
    activations: Activations = NoActivations(format="none")
    hadamard: Literal["none", 32, 64, 128] = "none"

    @model_validator(mode="after")
    def _pair_exists(self) -> "Rule":
        allowed = PAIRS[self.weights.format]
        if self.activations.format not in allowed:
            raise ValueError(
                f"{self.weights.format} weights do not go with {self.activations.format} activations; "
                f"allowed: {', '.join(allowed)}"
            )
        return self


class Recipe(Strict):
    """A whole conversion. The first rule that matches a linear wins; what no rule matches keeps its dtype."""

    description: str = Field("", description="one line for `quantrot recipes`")
    rotations: Rotations = Rotations()
    linear: tuple[Rule, ...] = ()
    skip: tuple[str, ...] = Field(("lm_head", "embed_tokens"), description="modules that no rule may touch")
    attention: Arithmetic = "bf16"
    kv_cache: KVCache = "bf16"

    _name: str = PrivateAttr("recipe")
    _file: str = PrivateAttr("recipe")
    _tree: Any = PrivateAttr(None)

    @property
    def name(self) -> str:
        """The shipped name or the file's stem: a label, not part of the recipe's content."""
        return self._name

    def where(self, *loc: str | int) -> str:
        """`file:line` of a field, for messages."""
        return f"{self._file}:{_line(self._tree, loc)}" if self._tree is not None else self._file

    @property
    def rotations_file(self) -> Path:
        """The file of learned rotations: a relative path starts where the recipe's file is."""
        return Path(self._file).parent / os.path.expanduser(self.rotations.path)

    @property
    def calibrated(self) -> bool:
        """Whether a rule rounds by GPTQ, which takes a text."""
        return any(rule.weights.rounding == "gptq" for rule in self.linear)

    def nearest(self) -> "Recipe":
        """The recipe with every weight rounded to nearest: what needs no text."""
        weights = [rule.weights.model_copy(update={"rounding": "nearest"}) for rule in self.linear]
        rules = [rule.model_copy(update={"weights": w}) for rule, w in zip(self.linear, weights, strict=True)]
        return self.model_copy(update={"linear": tuple(rules)})

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default written out, as plain JSON values."""
        return self.model_dump(mode="json")


def _one_of(field: str, value: Any, allowed: list[Any]) -> Any:
    if (tuple(value) if isinstance(value, list) else value) not in allowed:
        shown = _listed(allowed)
        hint = did_you_mean(value, [a for a in allowed if isinstance(a, str)]) if isinstance(value, str) else ""
        raise ValueError(f"{field} is {_shown(value)}; allowed: {shown}{hint}")
    return value


def _listed(allowed: list[Any]) -> str:
    return ", ".join(str(list(a) if isinstance(a, tuple) else a) for a in allowed)


def _shown(value: Any) -> str:
    """A value as messages show it: short, and whatever it is."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python prints no integer of more than 4300 digits
        return "a number of thousands of digits"


# --- Reading ---------------------------------------------------------------------------------------------------------


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with quantrot."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


RecipeLike = str | Path | dict[str, Any] | Recipe  # a shipped name, a YAML file, what one holds, or itself


def load_recipe(recipe: RecipeLike, file: str = "recipe") -> Recipe:
    """The recipe that is meant. ValueError tells what is wrong and where.

    file: what messages call the place of a dict, and where its relative paths start.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, dict):
        return _validate(recipe, file, "recipe", None)
    text = str(recipe)
    if text in shipped_recipes():
        path = SHIPPED / f"{text}.yaml"
    else:
        path = Path(os.path.expanduser(text))
        if path.is_dir() or not path.exists():
            raise ValueError(
                f"recipe {text!r} is neither a file nor a shipped recipe"
                f"{did_you_mean(text, shipped_recipes())}; shipped: {', '.join(shipped_recipes())}"
            )
    with path.open("rb") as stream:  # a pipe has no size
        read = stream.read(MAX_BYTES + 1)
    if len(read) > MAX_BYTES:
        size = max(path.stat().st_size, len(read))
        raise ValueError(f"{path}: {size} bytes; a recipe has at most {MAX_BYTES}")
    return parse_recipe(read, str(path), path.stem)


def parse_recipe(text: bytes, file: str = "recipe", name: str = "recipe") -> Recipe:
    """A recipe from YAML bytes; `file` is what messages call it."""
    try:
        decoded = text.decode()
        for event in yaml.parse(decoded, Loader=yaml.SafeLoader):
            _refuse_tricks(event, f"{file}:{event.start_mark.line + 1}" if event.start_mark else file)
        tree = yaml.compose(decoded, Loader=yaml.SafeLoader)
        _refuse_duplicates(tree, file)
        data = yaml.safe_load(decoded)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        if problem.startswith("but "):  # the second half of a sentence
            problem = f"{error.context}, {problem}"  # type: ignore[attr-defined]
        if isinstance(error, yaml.reader.ReaderError):
            line = f":{decoded.count(chr(10), 0, error.position) + 1}"
            problem = f"character {error.character:#x} is not allowed"
        raise ValueError(f"{file}{line}: not valid YAML: {problem}") from None
    except RecursionError:
        raise ValueError(f"{file}: nested too deeply to be a recipe") from None
    except (ValueError, OverflowError) as error:
        if str(error).startswith(file):
            raise
        raise ValueError(f"{file}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file}: a recipe is a mapping with the keys {', '.join(Recipe.model_fields)}")
    return _validate(data, file, name, tree)


def _refuse_tricks(event: Any, place: str) -> None:
    """Aliases, tags and merge keys could hide what a recipe says; a lone surrogate cannot be written anywhere."""
    if isinstance(event, yaml.AliasEvent):
        raise ValueError(f"{place}: aliases (*name) are not allowed; write the value")
    if getattr(event, "tag", None):
        raise ValueError(f"{place}: tags are not allowed (here {event.tag!r:.80}); write the plain value")
    if isinstance(event, yaml.ScalarEvent):
        if event.value == "<<":
            raise ValueError(f"{place}: merge keys (<<) are not allowed; write the keys themselves")
        if any("\ud800" <= letter <= "\udfff" for letter in event.value):
            raise ValueError(f"{place}: {event.value!r:.80} holds half of a surrogate pair; write the character itself")


def _refuse_duplicates(node: yaml.Node | None, file: str) -> None:
    """YAML readers keep the last of two equal keys; here that is an error."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key.value, str) and key.value in seen:
                raise ValueError(
                    f"{file}:{line}: {key.value!r} is given twice (first on line {seen[key.value]}); keep one"
                )
            seen[str(key.value)] = line
            _refuse_duplicates(value, file)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_duplicates(value, file)


def _validate(data: dict[str, Any], file: str, name: str, tree: Any) -> Recipe:
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(e, file, tree) for e in error.errors(include_url=False))) from None
    recipe._name, recipe._file, recipe._tree = name, file, tree
    return recipe


SEED = "a whole number from 0 to 2^63 - 1 is needed"  # of the only numbers whose errors are pydantic's
MAPPING = "a mapping (key: value) is needed"
ACTIVATIONS = "none or a mapping (key: value) is needed"  # off is False in YAML, nothing None
NEEDED = {  # by pydantic's names of errors
    "int_type": SEED,
    "greater_than_equal": SEED,
    "less_than": SEED,
    "string_type": "a string is needed, in quotes where it looks like a number",
    "string_too_short": "a linear's name or a glob is needed, as down_proj or '*'",
    "model_type": MAPPING,
    "model_attributes_type": MAPPING,
    "tuple_type": "a list is needed",
}


def _explain(error: Any, file: str, tree: Any) -> str:
    """One pydantic error as `file:line: field: what is wrong, what is allowed`."""
    loc = error["loc"]
    place = f"{file}:{_line(tree, loc)}" if tree is not None else file
    tags = {"fp8", "mxfp4", "int8", "none", "tuple[int, int]", "constrained-int", "int"}
    outer = [str(p) for p in loc[:-1] if p not in tags]
    if error["type"] in ("extra_forbidden", "invalid_key"):  # the second is no string
        key = str(loc[-1]) if error["type"] == "extra_forbidden" else _shown(error["input"])
        field = ".".join([*outer, key])
        known = sorted(_known_keys(loc[:-1]))
        return f"{place}: unknown key {field!r}; allowed: {', '.join(known)}{did_you_mean(key, known)}"
    field = ".".join(outer if loc[-1] in tags else [*outer, str(loc[-1])])
    if error["type"] in ("literal_error", "enum"):
        allowed = str(error["ctx"]["expected"])
        words = allowed.replace("'", "").replace(" or ", ", ").split(", ")
        hint = " (without quotes)" if error["input"] in words else did_you_mean(error["input"], words)
        return f"{place}: {field} is {_shown(error['input'])}; allowed: {allowed}{hint}"
    if error["type"] == "union_tag_invalid":
        tag, allowed = error["ctx"]["tag"], error["ctx"]["expected_tags"]
        hint = did_you_mean(tag, allowed.replace("'", "").split(", "))
        return f"{place}: {field}.format is {_shown(tag)}; allowed: {allowed}{hint}"
    if error["type"] == "union_tag_not_found":
        return f"{place}: {field} needs a format; write e.g. {{format: fp8, ...}}"
    if error["type"] == "missing":
        kinds = REQUIRED.get(".".join([*outer, str(loc[-1])][-2:]))
        return f"{place}: {field} is missing; it has no default" + (f"; allowed: {_listed(kinds)}" if kinds else "")
    if error["type"] in NEEDED:
        needed = ACTIVATIONS if loc[-1] == "activations" else NEEDED[error["type"]]
        return f"{place}: {field} is {_shown(error['input'])}; {needed}"
    message = error["msg"].removeprefix("Value error, ")
    got = "" if error["type"] == "value_error" else f" (got {_shown(error['input'])})"
    return f"{place}: {field}: {message}{got}"


def _known_keys(loc: tuple[str | int, ...]) -> set[str]:
    """The keys that the model at `loc` takes, found by walking the pydantic tree."""
    models: dict[str, type[BaseModel]] = {"rotations": Rotations, "linear": Rule}
    models |= dict.fromkeys(ROTATIONS, RotationSpec)
    formats: dict[str, dict[str, type[BaseModel]]] = {
        "weights": {"fp8": Fp8Weights, "mxfp4": Mxfp4Weights, "int8": Int8Weights},
        "activations": {"none": NoActivations, "fp8": Fp8Activations, "mxfp4": Mxfp4Activations},
    }
    words = [part for part in loc if isinstance(part, str)]
    if not words:
        return set(Recipe.model_fields)
    if len(words) >= 2 and words[-2] in formats:
        return set(formats[words[-2]][words[-1]].model_fields)
    return set(models[words[-1]].model_fields)


def _line(node: Any, loc: tuple[str | int, ...]) -> int:
    """The 1-based line of the deepest part of `loc` that the YAML tree has."""
    line = node.start_mark.line + 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    node, line = value, key.start_mark.line + 1
                    break
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def did_you_mean(word: Any, known: list[str]) -> str:
    """The end of a message: the known word that is nearest, if one is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6) if isinstance(word, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""
