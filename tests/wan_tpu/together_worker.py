"""Run by test_together.py in a process with four virtual CPU devices: requests stepped together on several meshes."""

import sys

from tests.wan_tpu.together import check
from wan_tpu import load_pipeline

for mesh in ((2, 1, 1), (2, 1, 2), (1, 2, 2)):
    pipe = load_pipeline(sys.argv[1], dtype="float32", mesh=mesh)
    check(pipe)
    if mesh == (2, 1, 2):
        check(pipe, guidance_scale=1.0)  # one branch: dp splits its tokens
print("checked")
