"""What is remembered of a conversation, and when it is forgotten."""

import gc

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from mlx_stream.prefill.cache_views import cache_offset
from mlx_stream.prerouter.tracks import Tracks

SAID = mx.array([[1, 2]])


def caches(tokens=3):
    made = [None, KVCache(), CacheList(KVCache(), KVCache())]
    made[1].offset = tokens
    return made


def test_a_track_holds_where_the_cache_stood():
    tracks, cache = Tracks(cache_offset), caches()
    assert tracks.find(cache) is None
    tracks.note(cache, SAID, None)
    found = tracks.find(cache)
    assert found.previous is SAID
    assert found.offset == 3
    assert tracks.find(list(cache)) is found  # the caches are the conversation, not the list


def test_a_cache_that_moved_is_forgotten_for_good():
    tracks, cache = Tracks(cache_offset), caches()
    tracks.note(cache, SAID, None)
    cache[1].offset = 2
    assert tracks.find(cache) is None
    cache[1].offset = 3
    assert tracks.find(cache) is None


def test_a_step_that_is_taken_back_is_taken_again_with_the_same_routing():
    tracks, cache = Tracks(cache_offset), caches()
    tracks.note(cache, SAID, None)
    before = tracks.find(cache)
    for again in range(2):
        cache[1].offset = 4
        tracks.note(cache, None, None)
        assert tracks.find(cache).previous is None
        cache[1].offset = 3
        assert tracks.find(cache) is before, again
    cache[1].offset = 4
    assert tracks.find(cache) is None  # what that step left was taken back


def test_more_than_one_step_back_is_a_beginning():
    tracks, cache = Tracks(cache_offset), caches()
    for offset in (3, 4, 5):
        cache[1].offset = offset
        tracks.note(cache, SAID, None)
    cache[1].offset = 3
    assert tracks.find(cache) is None


def test_conversations_are_apart():
    tracks, one, other = Tracks(cache_offset), caches(), caches()
    tracks.note(one, SAID, None)
    assert tracks.find(other) is None
    tracks.note(other, None, None)
    assert tracks.find(one).previous is SAID
    tracks.forget(one)
    assert tracks.find(one) is None
    assert tracks.find(other) is not None


def test_a_dropped_cache_leaves_nothing():
    tracks, cache = Tracks(cache_offset), [CacheList(KVCache()), KVCache()]
    tracks.note(cache, SAID, None)
    tracks.note(cache, SAID, None)
    assert len(tracks) == 1
    del cache
    gc.collect()
    assert len(tracks) == 0
