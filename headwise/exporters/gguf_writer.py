"""Tensors on their way into a GGUF file, each at the bits asked for."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headwise.errors import HeadwiseError

GGUF_TYPES = ("f32", "f16", "q8_0", "q4_0")
QUANT_BLOCK = 32  # weights of a row that share a scale


class GgufFile:
    """One file that is being written: sizes go in through `writer`, tensors through `add`."""

    def __init__(self, path: Path, architecture: str, dtype: str) -> None:
        try:
            import gguf
        except ImportError:
            raise HeadwiseError("GGUF files are written by the gguf package; pip install 'headwise[deploy]'.") from None
        self.package: Any = gguf
        self.writer: Any = gguf.GGUFWriter(path, architecture)
        self.dtype, self.unquantized_tensors = dtype, 0

    def add_tensor(self, name: str, tensor: Tensor, keep_float32: bool = False, is_vocab_table: bool = False) -> None:
        """Add a tensor: norms and biases `keep_float32`, an `is_vocab_table` is never coarser than 8 bits."""
        data = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
        dtype = "f32" if keep_float32 else "q8_0" if is_vocab_table and self.dtype == "q4_0" else self.dtype
        if dtype.startswith("q") and data.shape[-1] % QUANT_BLOCK:
            self.unquantized_tensors += 1
            dtype = "f16"
        if dtype == "f32":
            self.writer.add_tensor(name, data)
        elif dtype == "f16":
            self.writer.add_tensor(name, data.astype(np.float16))
        else:
            quant_type = self.package.GGMLQuantizationType[dtype.upper()]
            self.writer.add_tensor(name, self.package.quants.quantize(data, quant_type), raw_dtype=quant_type)

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
