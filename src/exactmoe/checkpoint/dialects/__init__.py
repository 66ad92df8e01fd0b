"""The layouts of packed weights in checkpoints. A new one is one file and one name in DIALECTS.

The dialect of a projection is decided from its tensors' names and dtypes, never from a config.
"""

from collections.abc import Mapping

from exactmoe.checkpoint.dialects.deepseek import DEEPSEEK_MXFP4
from exactmoe.checkpoint.dialects.dialect import Dialect, Part
from exactmoe.checkpoint.dialects.modelopt import MODELOPT_NVFP4
from exactmoe.checkpoint.dialects.plain import PLAIN_BF16

DIALECTS = (MODELOPT_NVFP4, DEEPSEEK_MXFP4, PLAIN_BF16)


def detect(dtypes: Mapping[str, str]) -> Dialect | None:
    """The dialect of a projection, or None where no dialect or more than one fits.

    The codes decide; where they are missing, the other tensors do if all of them belong to the
    dialect, so that the error can name what is missing.

    Args:
        dtypes: last word of the name -> dtype, of every tensor of the projection.
    """
    found = dtypes.items()
    fits = [d for d in DIALECTS if (d.parts[0].leaf, d.parts[0].dtype) in found]
    if not fits and dtypes:
        fits = [d for d in DIALECTS if found <= {(part.leaf, part.dtype) for part in d.parts}]
    return fits[0] if len(fits) == 1 else None


__all__ = [
    "DEEPSEEK_MXFP4",
    "DIALECTS",
    "MODELOPT_NVFP4",
    "PLAIN_BF16",
    "Dialect",
    "Part",
    "detect",
]
