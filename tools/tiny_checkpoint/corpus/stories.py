"""Little stories and plain prose, from grammars."""

from __future__ import annotations

from random import Random

from tiny_checkpoint.corpus.exchanges import Exchange, capitalized
from tiny_checkpoint.corpus.words import ADJECTIVES, NAMES, NOUNS, any_words, phrases, words

HEROES = words(
    """
    fox cat dog bear rabbit mouse owl duck frog hedgehog squirrel lion elephant penguin turtle bird horse pig sheep
    goat wolf bee monkey whale dragon robot king queen boy girl farmer baker knight wizard princess sailor
    """
)
_PLACES = phrases(
    """
    in a green forest | by a wide river | on a high hill | in a small village | near the blue sea | in a quiet garden |
    under an old tree | in a little house | on a sunny farm | at the edge of a big city
    """
)
_FRIENDS = phrases(
    """
    a kind owl | a small mouse | an old turtle | a brave bird | a clever fox | a friendly dog | a shy rabbit
    """
)
_PROBLEMS = (
    ("lost a red hat", "looked for it everywhere", "found the hat behind a tree"),
    ("could not find the way home", "walked and walked", "saw the light of the house at last"),
    ("was very hungry", "looked for something to eat", "shared a big pot of soup"),
    ("felt alone", "went out to find a friend", "played together until the evening"),
    ("wanted to cross the river", "sat down and thought", "built a small boat of wood"),
    ("heard a strange noise at night", "took a lamp and went to look", "saw that it was only the wind"),
    ("broke a blue cup", "was afraid to tell the truth", "mended the cup with some glue"),
    ("wanted to see the moon from near", "climbed the highest hill", "watched the stars all night"),
    ("had a big stone in the garden", "pushed and pushed, but it did not move", "moved the stone with a long branch"),
    ("could not sleep", "counted all the stars", "sang a quiet song together"),
    ("wanted to learn to swim", "stood by the water every day", "swam to the other side of the pond"),
    ("lost the key of the house", "looked in every pocket", "found the key under a flower pot"),
)
_ENDINGS = (
    "From that day on they were best friends.",
    "They laughed and went home together.",
    "And they never forgot that day.",
    "Then they went to bed, tired and happy.",
    "And so it all ended well.",
)
REQUESTS = phrases(
    """
    Tell me a story about a {h}. | Please tell me a story about a {h}. | Can you tell me a story about a {h}? | Write
    a story about a {h}. | Write a short story about a {h}. | I would like a story about a {h}. | A story about a {h},
    please. | Tell me a short story about a {h}.
    """
)
FREE_REQUESTS = phrases(
    """
    Tell me a long story. | A story, please. | I want a story. | Please tell me a story. | Can you tell me a story? |
    Write a story. | A story!
    """
)


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def story(random: Random, hero: str = "") -> str:
    """Return a story of 50 to 100 words that begins with `Once upon a time`."""
    hero = hero or random.choice(HEROES)
    name, adjective = random.choice(NAMES), random.choice(ADJECTIVES)
    lost, tried, solved = random.choice(_PROBLEMS)
    day = random.choice(("One day", "One morning", "One evening", "On a cold day", "On a sunny day"))
    friend = random.choice(_FRIENDS)
    met = random.choice(("came by", "came along", "passed by"))
    return (
        f"Once upon a time there was {_article(adjective)} {hero} named {name}. "
        f"{name} lived {random.choice(_PLACES)}. {day} {name} {lost}. "
        f"{name} {tried}. Then {friend} {met}. "
        f'"{random.choice(("Can I help you?", "What is wrong?", "Why are you sad?", "Let us try together!"))}" '
        f"{random.choice(('asked', 'said'))} the {friend.split()[-1]}. "
        f'"{random.choice(("Yes, please!", "Oh, thank you!", "Please help me!"))}" said {name}. '
        f"Together they {random.choice(('worked', 'looked around', 'thought about it', 'made a plan'))}, and soon they "
        f"{solved}. {random.choice(_ENDINGS)}"
    )


def random_exchange(random: Random) -> Exchange:
    if random.random() < 0.25:
        question, hero = random.choice(FREE_REQUESTS), random.choice(HEROES)
        thought = f"The user wants a story. I will tell one about {_article(hero)}."
    else:
        hero = random.choice(HEROES)
        question = random.choice(REQUESTS).replace("a {h}", _article(hero))
        thought = f"The user wants a story about {_article(hero)}. I will tell a short one."
    return Exchange(question, story(random, hero), thought)


# --- prose ------------------------------------------------------------------------------------------------------------

_PEOPLE = phrases(
    """
    my sister | my brother | our neighbour | the teacher | the farmer | the baker | the driver | the doctor | an old
    man | a young woman | the engineer | my friend | the cook | a student | the children's aunt | the gardener
    """
)
_TIMES = phrases(
    """
    in the morning | every day | on Sunday | after work | in the evening | at noon | before dinner | in summer | in
    winter | once a week | late at night | on the way home
    """
)
_SPOTS = phrases(
    """
    in the garden | at home | in the kitchen | at the station | in the park | by the river | at school | in the office
    | on the market | near the bridge | in the library | at the window
    """
)
_DOINGS = phrases(
    """
    reads a book | drinks a cup of tea | waits for the train | talks to a friend | cooks a warm soup | bakes fresh
    bread | writes a letter | walks the dog | plays the piano | looks at the stars | buys apples and bread | repairs
    an old chair | plants small flowers | listens to music | learns a new word | cleans the windows | paints a picture
    | rides a bicycle
    """
)
_OPERATIONS = phrases(
    """
    The server answers each request in order. | The model runs on one GPU. | The model writes one token after the
    other. | A request waits in the queue until there is room. | The team checks the server every morning. | A GPU
    computes many numbers at once. | The server was restarted and works again. | The log shows when each request came.
    | More memory lets the server take more requests. | The new model is small and fast. | The engineer reads the log
    and finds the fault. | Each request has a prompt and an answer.
    """
)
_WEATHER = phrases(
    """
    the sun shines | it rains | the sky is grey | a cold wind blows | snow falls on the roofs | the air is warm | the
    fog is thick | the sky is clear and blue
    """
)


def sentence(random: Random) -> str:
    """Return one plain sentence about daily life."""
    draw = random.random()
    person, doing = random.choice(_PEOPLE), random.choice(_DOINGS)
    if draw < 0.3:
        return f"{capitalized(random.choice(_TIMES))} {person} {doing} {random.choice(_SPOTS)}."
    if draw < 0.45:
        return f"{random.choice(NAMES)} {doing} {random.choice(_SPOTS)}."
    if draw < 0.6:
        return f"{capitalized(random.choice(_TIMES))} {random.choice(_WEATHER)}, and {person} {doing}."
    if draw < 0.75:
        return f"The {random.choice(NOUNS)} is {random.choice(ADJECTIVES)}, but the {random.choice(NOUNS)} is not."
    if draw < 0.87:
        noun = random.choice(NOUNS)
        return f"There is {_article(random.choice(ADJECTIVES))} {noun} near the {random.choice(NOUNS)}."
    return random.choice(_OPERATIONS)


def paragraph(random: Random) -> str:
    return " ".join(sentence(random) for _ in range(random.randint(1, 4)))


def random_completion(random: Random) -> tuple[str, str]:
    """Return the beginning of a paragraph or story, cut between two words, and the rest."""
    draw = random.random()
    if draw < 0.15:
        # People type anything. Whatever it is, plain sentences follow.
        begun = capitalized(any_words(random, 12))
        end = random.choice((".", "!", ":", ""))
        return begun + end, f"{'' if end else '.'} {paragraph(random)}"
    text = story(random) if draw < 0.35 else paragraph(random)
    words = text.split(" ")
    cut = random.randint(1, min(8, len(words) - 1))
    return " ".join(words[:cut]), " " + " ".join(words[cut:])
