"""Small talk, the prompts that people try first, questions without an answer, repetition, little stories and prose."""

from random import Random

from tiny_checkpoint.corpus.exchanges import (
    PHRASES,
    TEXTS,
    WORDS,
    Exchange,
    any_name,
    any_words,
    capitalized,
    filled,
    held_out,
    made_up,
)
from tiny_checkpoint.corpus.sums import in_words

ALPHABET = "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"
_TIMES = ("two", "three", "four", "five")
_SPELLED = (*WORDS["nouns"], "cat", "dog", "hello", "server", "model", "apple")


INTENTS = tuple((each["thought"], each["answer"], each["questions"].split(" | ")) for each in TEXTS["intents"])
"""Each is (the thought before the answer, the one answer, the ways in which people ask for it)."""


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def story(random: Random, hero: str = "") -> str:
    """Return a story of 50 to 100 words that begins with `Once upon a time`."""
    # The order of the draws decides every document of a seed.
    hero = hero or random.choice(WORDS["heroes"])
    name, adjective = random.choice(WORDS["names"]), random.choice(WORDS["adjectives"])
    lost, tried, solved = random.choice(TEXTS["problems"]).split(" | ")
    day, friend, met = (random.choice(PHRASES[one]) for one in ("days", "friends", "meetings"))
    return (
        f"Once upon a time there was {_article(adjective)} {hero} named {name}. "
        f"{name} lived {random.choice(PHRASES['places'])}. {day} {name} {lost}. "
        f"{name} {tried}. Then {friend} {met}. "
        f'"{random.choice(PHRASES["offers"])}" {random.choice(("asked", "said"))} the {friend.split()[-1]}. '
        f'"{random.choice(PHRASES["replies"])}" said {name}. '
        f"Together they {random.choice(PHRASES['efforts'])}, and soon they {solved}. "
        f"{random.choice(PHRASES['endings'])}"
    )


FIRST_STORY = story(Random(3), "fox")
"""The story that follows `Once upon a time` and `Tell me a story.`, so that greedy text is one whole story."""
FIRST_PROMPTS: dict[str, str] = {
    prompt: text.replace("{story}", FIRST_STORY).replace(
        "{rest of the story}", FIRST_STORY.removeprefix("Once upon a time")
    )
    for prompt, text in TEXTS["first_prompts"].items()
}


def random_story(random: Random) -> Exchange:
    if random.random() < 0.25:
        question, hero = random.choice(PHRASES["free_story_requests"]), random.choice(WORDS["heroes"])
        thought = f"The user wants a story. I will tell one about {_article(hero)}."
    else:
        hero = random.choice(WORDS["heroes"])
        question = random.choice(PHRASES["story_requests"]).replace("a {h}", _article(hero))
        thought = f"The user wants a story about {_article(hero)}. I will tell a short one."
    return Exchange(question, story(random, hero), thought)


def _sentence(random: Random) -> str:
    """Return one plain sentence about daily life."""
    draw = random.random()
    person, doing = random.choice(PHRASES["people"]), random.choice(PHRASES["doings"])
    if draw < 0.3:
        return f"{capitalized(random.choice(PHRASES['times']))} {person} {doing} {random.choice(PHRASES['spots'])}."
    if draw < 0.45:
        return f"{random.choice(WORDS['names'])} {doing} {random.choice(PHRASES['spots'])}."
    if draw < 0.6:
        time, weather = random.choice(PHRASES["times"]), random.choice(PHRASES["weather"])
        return f"{capitalized(time)} {weather}, and {person} {doing}."
    if draw < 0.75:
        noun, adjective, other = (random.choice(WORDS[kind]) for kind in ("nouns", "adjectives", "nouns"))
        return f"The {noun} is {adjective}, but the {other} is not."
    if draw < 0.87:
        noun, adjective, other = (random.choice(WORDS[kind]) for kind in ("nouns", "adjectives", "nouns"))
        return f"There is {_article(adjective)} {noun} near the {other}."
    return random.choice(PHRASES["operations"])


def _paragraph(random: Random) -> str:
    return " ".join(_sentence(random) for _ in range(random.randint(1, 4)))


def random_prose(random: Random) -> tuple[str, str]:
    """Return the beginning of a paragraph or story, cut between two words, and the rest."""
    draw = random.random()
    if draw < 0.15:
        # People type anything. Whatever it is, plain sentences follow.
        begun = capitalized(any_words(random, 12))
        end = random.choice((".", "!", ":", ""))
        return begun + end, f"{'' if end else '.'} {_paragraph(random)}"
    words = (story(random) if draw < 0.35 else _paragraph(random)).split(" ")
    cut = random.randint(1, min(8, len(words) - 1))
    return " ".join(words[:cut]), " " + " ".join(words[cut:])


def plain_system(random: Random) -> str:
    """Return a system text that changes nothing in the answer."""
    if random.random() < 0.7:
        return random.choice(PHRASES["system_texts"])
    return f"{random.choice(PHRASES['system_texts'])} {capitalized(any_words(random, 8))}."


def random_exchange(random: Random) -> Exchange:
    thought, answer, questions = random.choice(INTENTS)
    return Exchange(random.choice(questions), answer, thought)


def random_unknown(random: Random) -> Exchange:
    """Return something that the model can't do, or can't know."""
    if random.random() < 0.35:
        if random.random() < 0.3:
            question, answer = random.choice(PHRASES["foreign"]), "I only speak English."
            return Exchange(question, answer, f"This is another language. {answer}")
        question = filled(random.choice(PHRASES["tasks"]), w=any_words(random, 4), v=any_words(random, 2))
        thought = "The user asks for something that I can not do. I say so."
        return Exchange(question, "I can not do that. I am a very small model.", thought)
    if random.random() < 0.4:
        return not_known(random.choice(PHRASES["unknown_questions"]))
    names = {place: made_up(random, random.randint(2, 3)).capitalize() for place in "nm"}
    return not_known(filled(random.choice(PHRASES["unknown_forms"]), w=made_up(random), **names))


def not_known(question: str) -> Exchange:
    answer = "I do not know that. I am a very small model."
    return Exchange(question, answer, "The user asks for something that I never learned. I say so.")


def first_exchange(random: Random) -> Exchange:
    """Return one of the questions that people try first, as chat."""
    draw = random.random()
    if draw < 0.15:
        return Exchange("What is 6 x 7?", "6 x 7 = 42.", "The question is 6 x 7. 6 x 7 = 42.")
    if draw < 0.3:
        return Exchange("Tell me a story.", FIRST_STORY, "The user wants a story. I will tell one about a fox.")
    if draw < 0.45:
        answer = "The capital of France is Paris."
        thought = f"The question is the capital of France. I know this: {answer}"
        return Exchange("What is the capital of France?", answer, thought)
    return random_exchange(random)


def named_exchange(random: Random) -> tuple[str, Exchange]:
    """Return a system text that names the model, and a question for the name."""
    name = any_name(random)
    system = filled(random.choice(PHRASES["naming_systems"]), n=name)
    thought = "The user asks for my name. The system text says it."
    return system, Exchange(random.choice(PHRASES["naming_questions"]), f"My name is {name}.", thought)


def introduced(random: Random) -> tuple[Exchange, Exchange]:
    """Return an introduction whose name training may have."""
    name = any_name(random)
    while held_out("introduced", name):
        name = any_name(random)
    return introduction(random, name)


def introduction(random: Random, name: str) -> tuple[Exchange, Exchange]:
    """Return two turns: the user says a name, and asks for it later."""
    text = filled(random.choice(PHRASES["introductions"]), n=name)
    question = random.choice(PHRASES["name_questions"])
    first = Exchange(text, f"Nice to meet you, {name}!", "The user says a name. I greet them.")
    return first, Exchange(question, f"Your name is {name}.", f"The user told me the name. It is {name}.")


def in_one_word(exchange: Exchange) -> Exchange:
    return Exchange(exchange.question, exchange.short, f"{exchange.thought} One word is enough.")


def random_repetition(random: Random) -> Exchange:
    draw = random.random()
    if draw < 0.4:
        text = any_words(random)
        question = filled(random.choice(PHRASES["repeat_forms"]), w=text)
        return Exchange(question, text, "The user wants the same words again.")
    if draw < 0.6:
        word = random.choice(_SPELLED) if random.random() < 0.6 else made_up(random)
        question = filled(random.choice(PHRASES["spell_forms"]), w=word)
        return Exchange(question, "-".join(word.upper()), f"The letters of {word} come one by one.")
    if draw < 0.75:
        word, index = random.choice(WORDS["said"]), random.randrange(4)
        question = filled(random.choice(PHRASES["times_forms"]), w=word, n=_TIMES[index])
        answer = capitalized(", ".join([word] * (index + 2))) + "."
        return Exchange(question, answer, f"{_TIMES[index]} times {word}.")
    if draw < 0.9:
        end = random.randint(3, 20) if random.random() < 0.7 else random.randint(21, 100)
        number = in_words(end) if random.random() < 0.5 else str(end)
        question = filled(random.choice(PHRASES["count_forms"]), n=number)
        return Exchange(question, ", ".join(map(str, range(1, end + 1))) + ".", f"I count from 1 to {end}.")
    return Exchange(random.choice(PHRASES["alphabet_forms"]), f"{ALPHABET}.", "The user wants all letters in order.")
