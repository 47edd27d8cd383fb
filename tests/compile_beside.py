"""The code that torch.compile generates for a user's functions, in a process of its own, with or without this library.

``python compile_beside.py plain``, or ``fused``: after a step with kernels, and from a thread that compiles meanwhile.
"""

import re
import sys
import threading
import time
from collections import defaultdict

import torch
from torch._inductor.graph import GraphLowering

torch.set_num_threads(1)
FUNCTIONS = [
    lambda x: x.view(torch.int32) + 1,
    lambda x: (x * 2).sin() + 1,
    lambda x: ((x.view(torch.int32) & -65536).view(torch.float32) * x).bfloat16(),
]
COMPILED = {}
GENERATED = defaultdict(list)
GraphLowering.save_output_code = lambda code: GENERATED[threading.get_ident()].append(code)


def compile_one(index):
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 1000)
    torch.testing.assert_close(torch.compile(FUNCTIONS[index], fullgraph=True)(x), FUNCTIONS[index](x))
    code = GENERATED[threading.get_ident()][-1]
    COMPILED[index] = re.sub(r"#include \S+|/\S+|# AOT ID.*", "", code)  # but for the cache's place and a number


def fused_steps():
    import cprop

    started = torch._inductor.standalone_compile

    def standalone_compile(*arguments, **options):
        if not meanwhile.is_alive():
            meanwhile.start()
            time.sleep(2)
        return started(*arguments, **options)

    meanwhile = threading.Thread(target=compile_one, args=(1,))
    torch._inductor.standalone_compile = standalone_compile
    for state_dtype in ("float32", "bfloat16"):
        p = torch.nn.Parameter(torch.ones(100))
        p.grad = torch.ones(100)
        cprop.CPropAdam([p], fused=True, cprop_state_dtype=state_dtype).step()
        torch._inductor.standalone_compile = started
    meanwhile.join()


if __name__ == "__main__":
    if sys.argv[1] == "fused":
        fused_steps()
    for index in range(len(FUNCTIONS)):
        if index not in COMPILED:
            compile_one(index)
    print(*(COMPILED[index] for index in sorted(COMPILED)), sep="\n---\n")
