from hypothesis import given
from hypothesis import strategies as st

from molink.ring.seq_set import SeqSet


@given(st.lists(st.integers(1, 30)))
def test_is_a_set(seqs: list[int]) -> None:
    done = SeqSet()
    for seq in seqs:
        done.add_seq(seq)
    assert {seq for seq in range(1, 40) if seq in done} == set(seqs)
    assert 0 in done
    assert done.find_missing(range(40)) == set(range(1, 40)) - set(seqs)
    assert len(done) + done.watermark == len(set(seqs))


@given(st.permutations(range(1, 30)))
def test_remembers_nothing_below_the_watermark(seqs: list[int]) -> None:
    done = SeqSet()
    for seq in seqs:
        done.add_seq(seq)
    assert (done.watermark, len(done)) == (29, 0)
