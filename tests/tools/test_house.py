import pytest

import house


@pytest.mark.slow
def test_the_code_has_not_grown_and_a_folder_without_any_is_refused():
    """`make house` prints the figures. Whoever adds takes something out, or says in tests/house.py why not."""
    assert house.too_much() == []
    with pytest.raises(SystemExit, match="bild: expected"):
        list(house.grain(house.ROOT / "bild"))
