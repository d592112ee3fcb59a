"""Bytes and times in the form in which people read them."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def sized(num_bytes: float) -> str:
    """Format bytes in the unit that needs few digits: "642 GiB", "2.1 GiB"."""
    power = _power(num_bytes)
    return f"{_figure(num_bytes, power)} {_UNITS[power]}"


def part_of(part: float, whole: float) -> str:
    """Format a part and its whole, in bytes, with one unit: "171 of 642 GiB"."""
    power = _power(whole)
    return f"{_figure(part, power)} of {_figure(whole, power)} {_UNITS[power]}"


def about(seconds: float) -> str:
    """Format a rounded time: "2.5 s", "40 s", "4 min", "1 h 5 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _power(num_bytes: float) -> int:
    power = 0
    while num_bytes >= 1000 * 1024**power and power < len(_UNITS) - 1:
        power += 1
    return power


def _figure(num_bytes: float, power: int) -> str:
    value = num_bytes / 1024**power
    return f"{value:.1f}" if power and 0 < value < 9.95 else f"{value:,.0f}"
