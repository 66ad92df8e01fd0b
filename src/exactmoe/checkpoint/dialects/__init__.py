"""The layouts of weights in checkpoints. A new one is one file and one name in a table below.

The dialect of a projection is decided from its tensors' names and dtypes, never from a config.
"""

from collections.abc import Collection, Mapping, Sequence

from exactmoe.checkpoint.dialects.compressed_tensors import (
    COMPRESSED_TENSORS_MXFP4,
    COMPRESSED_TENSORS_NVFP4,
)
from exactmoe.checkpoint.dialects.deepseek import DEEPSEEK_MXFP4
from exactmoe.checkpoint.dialects.dialect import Dialect, Part, RefusedLayout
from exactmoe.checkpoint.dialects.fp8 import FP8_DIALECTS
from exactmoe.checkpoint.dialects.modelopt import MODELOPT_NVFP4
from exactmoe.checkpoint.dialects.plain import PLAIN_BF16
from exactmoe.checkpoint.dialects.stacked import (
    GPT_OSS_MXFP4,
    STACKED_BF16,
    STACKED_MXFP4,
    STACKED_NVFP4,
)

# One set of tensors per projection and expert.
DIALECTS = (
    MODELOPT_NVFP4,
    COMPRESSED_TENSORS_NVFP4,
    COMPRESSED_TENSORS_MXFP4,
    DEEPSEEK_MXFP4,
    *FP8_DIALECTS,
    PLAIN_BF16,
)
# One set of tensors for all experts.
STACKED_DIALECTS = (STACKED_NVFP4, STACKED_MXFP4, STACKED_BF16)
REFUSED_LAYOUTS = (GPT_OSS_MXFP4,)


def detect(dtypes: Mapping[str, str], dialects: Sequence[Dialect] = DIALECTS) -> list[Dialect]:
    """The dialects that a projection can be in: one where all is well, none for another layout.

    The codes decide, unless a part does not fit while a tensor that no part claims lies beside it:
    that is another layout. Where codes are missing, or say the same in two dialects, the other
    tensors decide if all of them belong to the dialect, so that the error can name what is missing.

    Args:
        dtypes: suffix of the name -> dtype, of every tensor of the projection.
        dialects: to choose from.
    """
    fits = [d for d in dialects if dtypes.get(d.parts[0].suffix) in d.parts[0].dtypes]
    if len(fits) != 1 and dtypes:
        fits = [d for d in fits or dialects if _holds(d, dtypes)]
    return [d for d in fits if _is_complete(d, dtypes) or _has_no_strangers(d, dtypes)]


def _holds(dialect: Dialect, dtypes: Mapping[str, str]) -> bool:
    known = {part.suffix: part.dtypes for part in dialect.parts}
    return all(dtype in known.get(suffix, ()) for suffix, dtype in dtypes.items())


def _is_complete(dialect: Dialect, dtypes: Mapping[str, str]) -> bool:
    return all(dtypes.get(part.suffix) in part.dtypes for part in dialect.parts)


def _has_no_strangers(dialect: Dialect, dtypes: Mapping[str, str]) -> bool:
    return set(dtypes) <= {part.suffix for part in dialect.parts}


def refused(suffixes: Collection[str]) -> RefusedLayout | None:
    """The known layout that is not run here and has all of its tensors among `suffixes`."""
    return next((layout for layout in REFUSED_LAYOUTS if layout.suffixes <= set(suffixes)), None)


__all__ = [
    "COMPRESSED_TENSORS_MXFP4",
    "COMPRESSED_TENSORS_NVFP4",
    "DEEPSEEK_MXFP4",
    "DIALECTS",
    "FP8_DIALECTS",
    "GPT_OSS_MXFP4",
    "MODELOPT_NVFP4",
    "PLAIN_BF16",
    "STACKED_BF16",
    "STACKED_DIALECTS",
    "STACKED_MXFP4",
    "STACKED_NVFP4",
    "Dialect",
    "Part",
    "RefusedLayout",
    "detect",
    "refused",
]
