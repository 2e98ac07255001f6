"""Overrides that overlap in two threads: each thread its own, the original afterwards."""

import threading
import types

from mlx_stream.backends.cpu.override import override


def test_overlapping_contexts_of_two_threads_restore_the_original():
    def original():
        return "original"

    module = types.SimpleNamespace(function=original)
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    seen = {}

    def first():
        with override(module, "function", lambda f: lambda: "first"):
            first_in.set()
            second_in.wait(10)
            seen["first"] = module.function()
        first_out.set()

    def second():
        first_in.wait(10)
        with override(module, "function", lambda f: lambda: f"second of {f()}"):
            second_in.set()
            first_out.wait(10)
            seen["second"] = module.function()

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    first_in.wait(10)
    seen["other"] = module.function()
    for thread in threads:
        thread.join(20)
    assert seen == {"first": "first", "second": "second of original", "other": "original"}
    assert module.function is original


def test_contexts_nest_and_survive_errors():
    module = types.SimpleNamespace(function=lambda: 0)
    original = module.function
    try:
        with override(module, "function", lambda f: lambda: 1):
            with override(module, "function", lambda f: lambda: 2):
                assert module.function() == 2
            assert module.function() == 1
            raise KeyError
    except KeyError:
        assert module.function is original
