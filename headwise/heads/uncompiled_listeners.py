"""Functions that torch.compile does not compile. Imported only during compilation, because the import loads the compiler."""

from typing import Any

import torch

from headwise.heads.hook_point import call_listeners

REASON = (
    "a listener is open (hw.record, hook_point.listen); it runs between compiled parts. Compile without fullgraph=True"
)
call_uncompiled: Any = torch.compiler.disable(call_listeners, reason=REASON)
