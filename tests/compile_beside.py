"""The code that torch.compile generates for a user's functions, in a process of its own, with or without this library.

``python compile_beside.py plain``; ``fused``: after a step with kernels, and from a thread that compiles meanwhile;
``generate``: as ``plain``, without the C++ compiler, which takes most of the time.
"""

import re
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress

import torch
from torch._inductor.graph import GraphLowering

FUNCTIONS = [
    lambda x: (x.view(torch.int32) + 1, ((x.view(torch.int32) & -65536).view(torch.float32) * x).bfloat16()),
    lambda x: (x * 2).sin() + 1,
]
COMPILED = {}
GENERATED = defaultdict(list)


def save(code):
    GENERATED[threading.get_ident()].append(code)
    if sys.argv[1] == "generate":
        raise NotImplementedError("this is all that was wanted")


def compile_one(index):
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 1000)
    compiled = torch.compile(FUNCTIONS[index], fullgraph=True)
    if sys.argv[1] == "generate":
        with suppress(torch._dynamo.exc.TorchDynamoException):
            compiled(x)
    else:
        torch.testing.assert_close(compiled(x), FUNCTIONS[index](x))
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
    p = torch.nn.Parameter(torch.ones(100))
    p.grad = torch.ones(100)
    cprop.CPropAdam([p], fused=True, cprop_state_dtype="bfloat16").step()  # its kernel is on integers too
    torch._inductor.standalone_compile = started
    meanwhile.join()


if __name__ == "__main__":  # pytest imports this file to look for doctests
    torch.set_num_threads(1)
    GraphLowering.save_output_code = save
    if sys.argv[1] == "fused":
        fused_steps()
    for index in range(len(FUNCTIONS)):
        if index not in COMPILED:
            compile_one(index)
    print(*(COMPILED[index] for index in sorted(COMPILED)), sep="\n---\n")
