import pytest

import house


@pytest.mark.slow
def test_the_code_has_not_grown():
    """`make house` prints the figures. Whoever adds takes something out, or says in tests/house.py why not."""
    assert house.too_much() == []
