"""Makes the batch that a config's data loader would give: from an invented file, or of a data set without pipeline."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.registry import DATASETS, FUNCTIONS, TRANSFORMS

from mmfsdp.errors import ConfigError
from mmfsdp_mmengine.configs.arguments import copied
from mmfsdp_mmengine.configs.packages import what_to_install

__all__ = ["sample_batch"]

IMAGE_SIZE = (768, 1280)
"""Height and width of the invented image. Its ratio reaches both limits of the usual ``scale=(1333, 800)``."""
OBJECTS = 8
"""Objects in the image."""

_DRAWS = 8  # of random crops and scales; caches of mosaics are full after five


def sample_batch(settings: Mapping[str, Any], batch_size: int, name: str = "train_dataloader") -> tuple[Any, str]:
    """Return a batch as a data loader of the config would give it, and where it is from.

    The config's own transforms run, the loading ones included, from one invented image file. Of several draws of random
    sizes it takes the largest. A data set without transforms is built, and gives its first samples. Call it in the
    config's scope.

    Args:
        settings: The content of the config. Not changed.
        batch_size: The samples in it.
        name: The data loader.

    Raises:
        ConfigError: The config has no such data loader; a transform or the data set cannot be built, or fails; the
            context names it.
    """
    loader = settings.get(name)
    dataset = loader.get("dataset") if isinstance(loader, Mapping) else None
    if not isinstance(loader, Mapping) or not isinstance(dataset, Mapping):
        raise ConfigError(
            f"The config has no {name} with a dataset, so the shapes of its batches are unknown. Give them with "
            "--batch.",
            config=name,
        )
    given = [*_transforms(dataset, f"{name}.dataset")]
    if not given:
        return _collate(loader, name)(_own_samples(dataset, batch_size, name)), "of the config's own data set"
    transforms = [(path, _built(transform, path)) for path, transform in given]
    with tempfile.TemporaryDirectory() as folder, _seeded():
        found = _record(Path(folder), [transform for _, transform in transforms])
        drawn = [sample for _ in range(_DRAWS) if (sample := _run(transforms, found)) is not None]
    if not drawn:
        raise ConfigError(
            "The data pipeline drops the invented image each time. Give the shapes with --batch.",
            config=f"{name}.dataset.pipeline",
        )
    largest = max(drawn, key=_elements)
    height, width = IMAGE_SIZE
    source = f"from an invented image of {width} x {height} with {OBJECTS} objects, through the config's data pipeline"
    return _collate(loader, name)([copy.deepcopy(largest) for _ in range(batch_size)]), source


def _own_samples(dataset: Mapping[str, Any], count: int, name: str) -> list[Any]:
    """Return the first samples of a data set that has no pipeline, and again from its first one if it has fewer."""
    try:
        built = DATASETS.build(copied(dataset))
        return [copy.deepcopy(built[index % len(built)]) for index in range(count)]
    except Exception as error:  # whatever a user's data set raises
        raise _failed(dataset.get("type"), "gives no samples", f"{name}.dataset", error) from error


def _transforms(dataset: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and config of each transform, from the innermost data set outwards."""
    inner = dataset.get("dataset")
    if isinstance(inner, Mapping):
        yield from _transforms(inner, f"{path}.dataset")
    several = dataset.get("datasets")
    if isinstance(several, list | tuple) and several and isinstance(several[0], Mapping):
        yield from _transforms(several[0], f"{path}.datasets[0]")
    for index, given in enumerate(dataset.get("pipeline") or ()):
        yield f"{path}.pipeline[{index}]", given


def _built(given: Any, path: str) -> Any:
    if not isinstance(given, Mapping):
        return given
    try:
        return TRANSFORMS.build(copied(given))
    except Exception as error:  # whatever a user's transform raises
        raise _failed(given.get("type"), "cannot be built", path, error) from error


def _run(transforms: list[tuple[str, Any]], found: Mapping[str, Any]) -> Any:
    """Return the sample that the transforms make, or None if one of them drops it."""
    sample: Any = copy.deepcopy(found)
    for path, transform in transforms:
        if hasattr(transform, "get_indexes"):  # it mixes images: give it some of the same
            sample["mix_results"] = [copy.deepcopy(sample) for _ in range(8)]
        try:
            sample = transform(sample)
        except Exception as error:  # whatever a user's transform raises
            raise _failed(type(transform).__name__, "fails on an invented image", path, error) from error
        if sample is None:
            return None
        if isinstance(sample, dict):
            sample.pop("mix_results", None)
    return sample


def _failed(name: Any, what: str, path: str, error: Exception) -> ConfigError:
    name = name if isinstance(name, str) else getattr(name, "__name__", name)
    return ConfigError(
        f"{name} {what}: {type(error).__name__}: {error}. {what_to_install(error)}".rstrip()
        + " Give the shapes of a batch with --batch instead.",
        config=path,
    )


def _record(folder: Path, transforms: list[Any]) -> dict[str, Any]:
    """Write an image and its labels, and return what data sets of OpenMMLab's packages know about an image."""
    height, width = IMAGE_SIZE
    image, labels = folder / "image.png", folder / "labels.png"
    cv2.imwrite(str(image), np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8))
    classes = np.zeros((height, width), np.uint8)
    classes[:, : width // 2] = 1  # no crop of it has one class only
    cv2.imwrite(str(labels), classes)
    side = min(height, width) // 3
    boxes = [[40 * index, 30 * index, 40 * index + side, 30 * index + side] for index in range(OBJECTS)]
    instances = [
        {
            "bbox": [float(value) for value in (left, top, right, bottom)],
            "bbox_label": 0,
            "ignore_flag": 0,
            "mask": [[left, top, right, top, right, bottom, left, bottom]],
        }
        for left, top, right, bottom in boxes
    ]
    zero = any(getattr(transform, "reduce_zero_label", False) for transform in transforms)
    return {
        "img_path": str(image),
        "img_id": 0,
        "sample_idx": 0,
        "height": height,
        "width": width,
        "instances": instances,
        "seg_map_path": str(labels),
        "seg_fields": [],
        "label_map": None,
        "reduce_zero_label": zero,
        "gt_label": 0,
    }


def _collate(loader: Mapping[str, Any], name: str) -> Any:
    given = loader.get("collate_fn") or {"type": "pseudo_collate"}
    config = dict(given)
    kind = config.pop("type")
    function = FUNCTIONS.get(kind) if isinstance(kind, str) else kind
    if function is None:
        raise ConfigError(f"{kind!r} is not a registered function.", config=f"{name}.collate_fn")
    return lambda samples: function(samples, **config)


def _elements(sample: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(sample)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


@contextmanager
def _seeded() -> Iterator[None]:
    """Make random transforms draw the same each time, and restore the state of generators."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
