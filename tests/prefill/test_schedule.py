"""The pure part of the plan: how prompts are cut into segments and chunks, layers into groups."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.prefill.schedule import cut_groups, cut_segments

FAST = settings(max_examples=200, deadline=None)


@FAST
@given(st.integers(1, 400), st.integers(1, 500), st.integers(1, 500))
def test_segments_and_chunks_cover_every_token_once(tokens, segment_tokens, chunk_tokens):
    segments = cut_segments(tokens, segment_tokens, chunk_tokens)
    chunks = [chunk for segment in segments for chunk in segment.chunks]
    assert [t for a, b in chunks for t in range(a, b)] == list(range(tokens))
    assert chunks[-1] == (tokens - 1, tokens), "the last token is a chunk of its own"
    assert all(0 < b - a <= chunk_tokens for a, b in chunks)
    for segment in segments:
        assert segment.start == segment.chunks[0][0]
        assert segment.stop == segment.chunks[-1][1]
        assert segment.tokens == sum(b - a for a, b in segment.chunks)
        assert segment.tokens <= segment_tokens + 1
    assert len(segments) == max(1, -(-(tokens - 1) // segment_tokens))


def test_no_segment_exists_for_the_last_token_alone():
    assert len(cut_segments(65, 64, 64)) == 1
    assert cut_segments(1, 64, 64)[0].chunks == ((0, 1),)
    assert cut_segments(5, 2, 9)[-1].chunks == ((2, 4), (4, 5))


@FAST
@given(st.integers(1, 300), st.integers(1, 300))
def test_groups_cover_every_expert_once_in_order(experts, size):
    groups = cut_groups(experts, size)
    assert [e for a, b in groups for e in range(a, b)] == list(range(experts))
    assert all(0 < b - a <= size for a, b in groups)
    assert all(b - a == size for a, b in groups[:-1])
