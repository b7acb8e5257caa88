"""Tensors on their way into a GGUF file, each at the bits asked for."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headwise.errors import HeadwiseError

TYPES = ("f32", "f16", "q8_0", "q4_0")
BLOCK = 32  # weights of a row that share a scale


class GgufFile:
    """One file that is being written: sizes go in through `writer`, tensors through `add`."""

    def __init__(self, path: Path, architecture: str, dtype: str) -> None:
        try:
            import gguf
        except ImportError:
            raise HeadwiseError("GGUF files are written by the gguf package; pip install 'headwise[deploy]'.") from None
        self.package: Any = gguf
        self.writer: Any = gguf.GGUFWriter(path, architecture)
        self.dtype, self.kept = dtype, 0

    def add(self, name: str, tensor: Tensor, plain: bool = False, table: bool = False) -> None:
        """`plain` ones stay in float32: norms and biases; a `table` of tokens is never coarser than 8 bits."""
        data = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
        dtype = "f32" if plain else "q8_0" if table and self.dtype == "q4_0" else self.dtype
        if dtype.startswith("q") and data.shape[-1] % BLOCK:
            self.kept += 1
            dtype = "f16"
        if dtype == "f32":
            self.writer.add_tensor(name, data)
        elif dtype == "f16":
            self.writer.add_tensor(name, data.astype(np.float16))
        else:
            kind = self.package.GGMLQuantizationType[dtype.upper()]
            self.writer.add_tensor(name, self.package.quants.quantize(data, kind), raw_dtype=kind)

    def close(self) -> None:
        """Write the file; one that cannot be written is closed all the same."""
        try:
            self.writer.write_header_to_file()
            self.writer.write_kv_data_to_file()
            self.writer.write_tensors_to_file()
            self.writer.close()
        except BaseException:
            for file in self.writer.fout or ():
                with suppress(OSError):  # what is left to be written cannot be, either
                    file.close()
            raise
