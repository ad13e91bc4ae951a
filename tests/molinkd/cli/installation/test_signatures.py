"""Signatures that minisign 0.11 made are accepted, and nothing else."""

import pytest

from molink.errors import MolinkError
from molinkd.cli.installation.signatures import check_signature, read_own_key

KEY = "RWS6duQ4u43hED5wTmV8naDya/5HTHS4JtqCFNx/Ft+sGxlmBxc1Ya/x"
DATA = b"abc\n"
SIGNATURE = """untrusted comment: signature from minisign secret key
RUS6duQ4u43hECHHjV6qg7kjUr0MIjJg/IhB83XIbS2KNURGQlJQkRXtuNeu3UP8BqBnoqhmD4Jo1HyKJUHnir2agJ04IG1UWgs=
trusted comment: molink test
V2s3T5QGietwGqKVtKD1AtL5iUXaed328LMi2CkT+hU04Gd2n6K83u5TcJcrkSzyPz4LzbzgZrCwv7vg2qvQAw==
"""


def test_a_signature_of_minisign() -> None:
    check_signature(DATA, SIGNATURE, KEY)
    check_signature(DATA, SIGNATURE.replace("secret key", "another comment"), KEY)


@pytest.mark.parametrize(
    ("data", "signature", "key"),
    [
        (b"abd\n", SIGNATURE, KEY),
        (DATA, SIGNATURE.replace("molink test", "molink, newer"), KEY),
        (DATA, SIGNATURE.replace("RUS6", "RWS6"), KEY),
        (DATA, SIGNATURE.replace("V2s3", "V2s4"), KEY),
        (DATA, SIGNATURE, KEY[:-3] + "AAA"),
        (DATA, SIGNATURE, KEY.replace("RWS6", "RWS7")),
        (DATA, SIGNATURE, KEY[:20]),
        (DATA, SIGNATURE, ""),
        (DATA, "", KEY),
        (DATA, "<html>\n" * 9, KEY),
        (DATA, "ä\n" * 4, KEY),
    ],
)
def test_anything_else_is_refused(data: bytes, signature: str, key: str) -> None:
    with pytest.raises(MolinkError, match="not signed by the key"):
        check_signature(data, signature, key)


def test_a_checkout_has_no_key() -> None:
    assert read_own_key() == ""
