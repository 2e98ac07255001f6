import sys, time, traceback
from tests.decode.running import *
from tests.decode import running as R
import pytest, mlx.core as mx
def test_cover():
    rows = covering(dict(a=range(5), b=range(6), c=range(3), d=range(5), e=range(4), f=range(2)), 2)
    print(len(rows))
    t=time.time(); print(len(covering(dict(b=range(6), c=range(3), d=range(5), e=range(4), f=range(2)), 3)), time.time()-t)
@pytest.mark.parametrize("name", ["qwen3_moe","gpt_oss","qwen3_next","deepseek_v3","demo"])
def test_settled(checkpoint, stock, name):
    from mlx_stream.hub import demo_path
    path = demo_path() if name=="demo" else checkpoint(name)
    t=time.time()
    for skip in (0,1):
        p,a = settled_answer(stock, path, 30, 256, skip)
        print(name, time.time()-t, len(set(a)), a[:40])
