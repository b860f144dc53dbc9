"""The names that weights have in a Hugging Face folder: its model's names, and each tied weight once."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.codes import needless_parts, not_restored, scales_of
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.elements import equal_data
from mmfsdp.checkpoint.formats.common.source import MODEL_FILES
from mmfsdp.checkpoint.formats.huggingface.config_sizes import check_sizes
from mmfsdp.checkpoint.formats.huggingface.model_folders import CONFIG, read_config
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.tree import common_prefix
from mmfsdp.errors import ConfigError, closest

__all__ = ["Ties", "also_the_head", "check_names", "is_head", "own_weights", "without_ties"]

_ADAPTED = re.compile(r"\.(base_layer|lora_[AB]|lora_embedding_[AB])\.")
# In the order in which transformers and diffusers prefer them.
_OWN_WEIGHTS = (
    *MODEL_FILES,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# What transformers ties when config.json does not say otherwise: `_tied_weights_keys` of its models.
_INPUTS = r"(.*\.)?(shared|wte|embed_tokens|word_embeddings|embed_in|tok_embeddings|embeddings?)\.weight"
_TIES = (
    (r"(.*\.)?(lm_head|embed_out|lm_head\.decoder|cls\.predictions\.decoder|predictions\.decoder)\.weight", _INPUTS),
    (r"(.*\.)?(lm_head|(cls\.)?predictions)\.decoder\.bias", r"(.*\.)?(lm_head|predictions)\.bias"),
    (r"(.*\.)?(encoder|decoder)\.embed_tokens\.weight", r"(.*\.)?shared\.weight"),
)
# The classes of transformers that end in a head over the vocabulary.
_WITH_HEAD = "LMHead|CausalLM|Conditional(Generation|Generator)|MaskedLM|ForPreTraining|ImageTextToText|Seq2Seq"


def own_weights(folder: Path, opened: Callable[[Path], Layout]) -> Mapping[str, TensorEntry]:
    """Return the weights that a folder has already; none if it has no weights.

    Args:
        folder: The folder.
        opened: Opens a checkpoint.
    """
    file = next((folder / name for name in _OWN_WEIGHTS if (folder / name).is_file()), None)
    return {} if file is None else opened(file).tensors


def without_ties(
    tensors: Mapping[str, TensorEntry], like: Path, own: Mapping[str, TensorEntry], *, by_recipe: bool = False
) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """Return the tensors to write, and notes: tied weights once, under the names that the folder's model has.

    Args:
        tensors: The weights by name.
        like: A folder of the same model.
        own: The weights that it has; if there are any, names and shapes must be theirs.
        by_recipe: Whether a recipe made the weights.

    Raises:
        ConfigError: Names or shapes do not fit the model, or not the sizes that its config states, or weights
            that its config ties differ.
    """
    ties = Ties.of(like, own)
    kept = dict(tensors)
    notes = []
    for name, first in ties.candidates(tensors):
        if not equal_data(tensors[name], tensors[first]):
            ties.refuse_unequal(name, first)
            continue
        del kept[name]
        notes.append(f"{name} is tied to {first} and written once")
    check_names(kept, {*tensors}, like, own, advise=lambda: "" if by_recipe else _shipped_recipe(tensors, own, like))
    check_sizes(kept, like)
    return kept, tuple(notes)


@dataclass(frozen=True)
class Ties:
    """The weights that the model of a folder may tie."""

    like: Path
    """The folder."""
    stated: bool | None
    """The value in its config; ``None`` if there is none, which transformers takes as true."""
    own: frozenset[str]
    """The names of its weights, if it has any."""

    @classmethod
    def of(cls, like: Path, own: Collection[str]) -> Ties:
        """Read the config of a folder.

        Args:
            like: The folder.
            own: The names of its weights.
        """
        stated = read_config(like).get("tie_word_embeddings")
        return cls(like, stated if isinstance(stated, bool) else None, frozenset(own))

    @property
    def possible(self) -> bool:
        """Whether the config lets the model tie weights."""
        return self.stated is not False

    def candidates(self, tensors: Mapping[str, TensorEntry]) -> Iterator[tuple[str, str]]:
        """Yield names that may be second names, and the first name of each."""
        if not self.possible:
            return
        dropped: set[str] = set()
        for second, first in _TIES:
            for name, entry in tensors.items():
                if name in dropped or name in self.own or not re.fullmatch(second, name):
                    continue
                same = [
                    other
                    for other, its in tensors.items()
                    if other not in (name, *dropped)
                    and re.fullmatch(first, other)
                    and (its.shape, its.dtype) == (entry.shape, entry.dtype)
                ]
                if same:
                    dropped.add(name)
                    yield name, same[0]

    def refuse_unequal(self, second: str, first: str) -> None:
        """Raise if two weights that differ would be tied when the folder is loaded.

        Raises:
            ConfigError: They would.
        """
        if self.stated or (self.own and second not in self.own):
            raise ConfigError(
                f"{CONFIG} of {self.like.name} ties {second!r} to {first!r}, but they differ: a model loaded from the "
                f'folder would lose the first. Set "tie_word_embeddings" to false in its {CONFIG}.',
                file=str(self.like / CONFIG),
            )


def is_head(name: str) -> bool:
    """Tell whether a weight has the name of a head that a model may tie to its embedding."""
    return re.fullmatch(_TIES[0][0], name) is not None


def also_the_head(folder: Path, names: Collection[str], changed: Iterable[str]) -> str | None:
    """Return a weight that changes and that the model of a folder uses as its head, too, as no file holds one.

    Args:
        folder: The folder, which need not have a config.
        names: The names of all weights.
        changed: The names of those that change.
    """
    head, inputs = _TIES[0]
    if any(re.fullmatch(head, name) for name in names) or not (folder / CONFIG).is_file():
        return None
    if not _has_tied_head(read_config(folder)):
        return None
    return next((name for name in changed if re.fullmatch(inputs, name)), None)


def _has_tied_head(config: Mapping[str, object]) -> bool:
    """Tell whether a model whose files hold no head uses its embedding as one, by its config.

    A config need not state it: transformers 4 left out what is the default of a class, such as GPT-2's.
    """
    nested = [value.get("tie_word_embeddings") for value in config.values() if isinstance(value, Mapping)]
    stated = next((value for value in (config.get("tie_word_embeddings"), *nested) if isinstance(value, bool)), None)
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:  # a bare encoder, or a classifier, has no such head
        return stated is not False and any(re.search(_WITH_HEAD, str(name)) for name in architectures)
    return stated is True


def _shipped_recipe(tensors: Mapping[str, TensorEntry], own: Mapping[str, TensorEntry], like: Path) -> str:
    """Return a sentence that names the shipped recipe which makes the weights of a folder; empty if there is none."""
    from mmfsdp.checkpoint.recipes.recipe_search import fitting_recipes

    def rate(made: Mapping[str, TensorEntry]) -> int:
        return all(name in made and made[name].shape == entry.shape for name, entry in own.items())

    found = fitting_recipes(tensors, rate, folders=[like])
    given = [
        argument("recipe", name) + (f", {argument('inverse', True)}" if inverse else "") for name, inverse in found
    ]
    return f" Set {' or '.join(given)}: this shipped recipe makes them." if given else ""


def check_names(
    kept: Mapping[str, TensorEntry],
    given: set[str],
    like: Path,
    expected: Mapping[str, TensorEntry],
    *,
    advise: Callable[[], str] = lambda: "",
) -> None:
    """Compare what will be written with the weights of a folder, if it has any.

    Args:
        kept: The tensors to write.
        given: The names of all tensors, second names of tied ones included.
        like: A folder of the same model.
        expected: The weights that it has.
        advise: Returns a sentence that says what to write; empty if it knows nothing.

    Raises:
        ConfigError: Names or shapes differ; the message says which, and what to write.
    """
    if (adapted := next((name for name in kept if name not in expected and _ADAPTED.search(name)), None)) is not None:
        raise ConfigError(
            f"{adapted!r} is a name that PEFT gives to the weights of a model with an adapter, and from_pretrained "
            f"does not load it from such a folder. Convert a checkpoint with {argument('recipe', 'peft-to-base')} for "
            "the base, and with 'peft-to-adapter' for the adapter; merge-lora then merges the two.",
            config="recipe",
        )
    if not expected:
        return
    scales = {name: scale for name, scale in scales_of(expected).items() if _are_numbers(name, kept)}
    needless = needless_parts(expected, scales)
    missing = [name for name in expected if name not in given and name not in needless and not _is_scale(name, kept)]
    unexpected = [name for name in kept if name not in expected]
    shapes = [name for name in kept if name in expected and kept[name].shape != expected[name].shape]
    problems = [
        *([f"it lacks {name_list(missing, 4)}"] if missing else []),
        *([f"it has {name_list(unexpected, 4)} besides"] if unexpected else []),
        *(f"{name!r} has shape {[*kept[name].shape]} (expected {[*expected[name].shape]})" for name in shapes[:2]),
    ]
    if problems:
        remedy = f" {codes}" if (codes := not_restored(kept)) else ""
        if not remedy and scales_of(kept):
            remedy = f" Its weights are codes of 8 bits. Add {argument('quantize', 'none')}, which restores them."
        if not (remedy := remedy or advise()):
            hint = closest(unexpected[0], missing) if unexpected else ""
            if prefix := common_prefix(unexpected, missing):
                hint = f" Most names match without {prefix!r}: set {argument('strip_prefix')} to it."
            remedy = (
                f"{hint} Use a {argument('recipe')}, {argument('strip_prefix')} or {argument('rename')} for other "
                f"names and {argument('exclude')} for what is too much. If the model has changed on purpose, give a "
                f"folder without weights as {argument('like')}."
            )
        raise ConfigError(
            f"The checkpoint does not fit the weights in {str(like)!r}: {'; '.join(problems)}.{remedy}", config="like"
        )


def _is_scale(name: str, kept: Mapping[str, TensorEntry]) -> bool:
    """Tell whether a tensor is the scale of codes that are written as numbers."""
    weight = re.sub(r"(weight_scale(_inv)?|input_scale)$", "weight", name)
    return weight != name and _are_numbers(weight, kept)


def _are_numbers(name: str, kept: Mapping[str, TensorEntry]) -> bool:
    return name in kept and itemsize(kept[name].dtype) > 1
