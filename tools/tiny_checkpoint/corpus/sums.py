"""Sums, differences and products, with the thought that works out the longer ones digit by digit."""

from dataclasses import dataclass
from random import Random

from tiny_checkpoint.corpus.exchanges import PHRASES, WORDS, Exchange, capitalized, filled, held_out


def in_words(number: int) -> str:
    """Return a number from 0 to 100 in words."""
    if number < 20:
        return WORDS["ones"][number]
    if number == 100:
        return "one hundred"
    tens, ones = divmod(number, 10)
    return WORDS["tens"][tens - 2] + (f"-{WORDS['ones'][ones]}" if ones else "")


_SIGNS = {"plus": "+", "minus": "-", "times": "x"}
FORMS, WORD_FORMS = PHRASES["sum_forms"], PHRASES["sum_word_forms"]
COMPLETIONS = ("{a} {o} {b} =", "{a} {w} {b} is", "Question: What is {a} {o} {b}?\nAnswer:")


@dataclass(frozen=True, slots=True)
class Sum:
    """`word` is plus, minus or times."""

    a: int
    word: str
    b: int

    @property
    def result(self) -> int:
        return {"plus": self.a + self.b, "minus": self.a - self.b, "times": self.a * self.b}[self.word]

    @property
    def held_out(self) -> bool:
        """Tell whether training leaves the sum out. The demo asks for 6 x 7; a square can't be told from its turn."""
        kept = self.word == "times" and (self.a == self.b or (self.a, self.b) == (6, 7))
        return not kept and held_out(self.word, self.a, self.b)

    @property
    def is_long(self) -> bool:
        return self.word != "times" and max(self.a, self.b) > 20

    def fill(self, form: str, *, words: bool = False) -> str:
        a, b = (in_words(self.a), in_words(self.b)) if words else (str(self.a), str(self.b))
        return filled(form, a=a, b=b, w=self.word, o=_SIGNS[self.word])

    def exchange(self, form: str, *, words: bool = False) -> Exchange:
        result = in_words(self.result) if words else str(self.result)
        answer = self.fill("{a} {w} {b} is" if words else "{a} {o} {b} =", words=words) + f" {result}."
        return Exchange(
            capitalized(self.fill(form, words=words)), capitalized(answer), self.thought(words), capitalized(result)
        )

    def thought(self, words: bool = False) -> str:
        question = self.fill("The question is {a} {o} {b}.")
        if not self.is_long:
            return f"{question} {self.fill('{a} {o} {b}')} = {self.result}."
        (tens_a, ones_a), (tens_b, ones_b) = divmod(self.a, 10), divmod(self.b, 10)
        if self.word == "plus":
            ones = ones_a + ones_b
            carry = ones // 10
            steps = (
                f"Ones: {ones_a} + {ones_b} = {ones}, write {ones % 10}, carry {carry}. "
                f"Tens: {tens_a} + {tens_b} + {carry} = {tens_a + tens_b + carry}."
            )
        else:
            borrow = int(ones_a < ones_b)
            ones_a += 10 * borrow
            steps = (
                f"Ones: borrow {borrow}, {ones_a} - {ones_b} = {ones_a - ones_b}. "
                f"Tens: {tens_a} - {tens_b} - {borrow} = {tens_a - tens_b - borrow}."
            )
        return f"{question} {steps} Together {self.result}."


SMALL_SUMS = (
    *(Sum(a, "plus", b) for a in range(21) for b in range(21)),
    *(Sum(a, "minus", b) for a in range(21) for b in range(a + 1)),
    *(Sum(a, "times", b) for a in range(11) for b in range(11)),
)
LONG_SUMS = (
    *(Sum(a, "plus", b) for a in range(10, 100) for b in range(10, 100)),
    *(Sum(a, "minus", b) for a in range(10, 100) for b in range(10, a + 1)),
)


def random_sum(random: Random, sums: tuple[Sum, ...] = SMALL_SUMS) -> Sum:
    while True:
        drawn = random.choice(sums)
        if not drawn.held_out:
            return drawn


def random_exchange(random: Random) -> Exchange:
    words = random.random() < 0.2
    return random_sum(random).exchange(random.choice(WORD_FORMS if words else FORMS), words=words)


def random_completion(random: Random) -> tuple[str, str]:
    drawn = random_sum(random)
    return drawn.fill(random.choice(COMPLETIONS)), f" {drawn.result}."
