"""Functions that torch.compile leaves alone. Imported only while code is compiled, because the import loads its compiler."""

from typing import Any

import torch

from headwise.heads.hook_point import call_listeners

REASON = (
    "a listener is open (hw.record, hook_point.listen); it runs between compiled parts. Compile without fullgraph=True"
)
call_uncompiled: Any = torch.compiler.disable(call_listeners, reason=REASON)
