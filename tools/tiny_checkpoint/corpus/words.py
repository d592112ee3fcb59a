"""Names and words that the grammars draw from, and made-up ones, with which the model learns to copy."""

from __future__ import annotations

from random import Random


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """Return the phrases of a text with bars between them, which may have line breaks for spaces."""
    return tuple(" ".join(text.split()).split(" | "))


NAMES = words(
    """
    Ada Ben Clara David Emma Finn Grace Henry Ivy Jack Kate Leo Mia Noah Olivia Paul Rosa Sam Tom Uma Vera Will Zoe
    Anna Bob Alice Carl Dora Eric Flora Hugo Ines Julia Karl Lena Max Nina Otto Pia Ruth Simon Tina Victor Maria Peter
    Lucy
    """
)
ADJECTIVES = words(
    """
    small big old young brave clever quiet happy sad hungry kind little lazy shy gentle curious tired proud friendly
    wise
    """
)
NOUNS = words(
    """
    apple book boat ball bridge cake chair cloud cup door field flower forest garden hat hill house key lake lamp
    letter map moon mountain park pen pond rain river road rock sea shoe shop song star stone street sun table tower
    town train tree village wall water wind window
    """
)
PLAIN_WORDS = words(
    """
    red green blue yellow open close early late meeting lunch dinner ready soon today tomorrow please call back home
    send bring buy milk bread tickets the a is are we you they will see at noon now later good news work done train
    bus help thanks report server restart model update price list photo music river best small near cheap travel
    weather history recipe soup how to learn fast new old happy birthday
    """
)
_STARTS = words(
    """
    b br c cr d dr f fl g gr h j k kl l m n p pl qu r s sh st t tr v w z
    """
)
_MIDDLES = words(
    """
    a e i o u ai ea oo ou
    """
)
_ENDS = ("", "", "n", "r", "l", "s", "t", "m", "nd", "rk", "x")


def made_up(random: Random, syllables: int = 2) -> str:
    """Return a word that means nothing, such as `flonder`."""
    parts = (random.choice(_STARTS) + random.choice(_MIDDLES) for _ in range(syllables))
    return "".join(parts) + random.choice(_ENDS)


def any_name(random: Random) -> str:
    """Return a known name, or a made-up one."""
    return random.choice(NAMES) if random.random() < 0.5 else made_up(random, random.randint(1, 3)).capitalize()


def any_words(random: Random, most: int = 6) -> str:
    """Return up to `most` words, some of them made up."""
    return " ".join(
        random.choice(PLAIN_WORDS) if random.random() < 0.8 else made_up(random) for _ in range(random.randint(1, most))
    )
