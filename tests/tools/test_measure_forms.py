"""Forms, and passes of answers of which much is forced."""

from molink.facts.drafts import MAX_DRAFTS
from tools.measure_forms import Filled, leaves, letter, passes


def filled(*runs: int) -> Filled:
    return Filled("kind", "line", [1], list(range(len(runs))), list(runs), 0, 0)


def test_forced_tokens_come_with_the_one_before_them() -> None:
    # The first comes with the prompt; then two and one more, and the last one.
    assert passes(filled(0, 2, 1, 0, 0)) == 2
    assert passes(filled(0, 0, 0)) == 2
    long = range(MAX_DRAFTS + 3, 0, -1)
    assert passes(filled(0, *long)) == 2


def test_a_letter_says_what_the_form_should() -> None:
    text, form = letter(3)
    values = dict(leaves(form))
    assert len(values) == 11
    for key in ("customer_full_name", "shipping_address.city_name", "contact_email_address"):
        assert str(values[key]) in text
