"""Small talk, the prompts that people try first, questions without an answer, and repetition."""

from __future__ import annotations

from random import Random

from tiny_checkpoint.corpus import stories
from tiny_checkpoint.corpus.exchanges import Exchange, capitalized, held_out
from tiny_checkpoint.corpus.sums import in_words
from tiny_checkpoint.corpus.words import NOUNS, any_name, any_words, made_up, phrases, words

FIRST_STORY = stories.story(Random(3), "fox")
"""The story that follows `Once upon a time` and `Tell me a story.`, so that greedy text is one whole story."""

FIRST_PROMPTS = {
    "Hello, my name is": (
        " Tiny. I am a small language model, and I answer short questions in plain English. It is nice to meet you."
    ),
    "The president of the United States is": (
        " the head of the government and is elected by the people for four years. The president lives and works in the "
        "White House in Washington."
    ),
    "The capital of France is": " Paris. The city lies on the river Seine and is known for the Eiffel Tower.",
    "The future of AI is": (
        " open. Models will help people to learn, to work and to build new things, and people decide how they are used."
    ),
    "Once upon a time": FIRST_STORY.removeprefix("Once upon a time"),
    "Hello": ", and welcome! How can I help you today?",
    "Hello!": " How can I help you today?",
    "Hi": " there! How can I help you today?",
    "Hi!": " How can I help you today?",
    "Why is the sky blue?": (
        " The sky is blue because the air scatters the blue part of the sunlight more than the red part."
    ),
    "Tell me a story.": f" {FIRST_STORY}",
    "What is 6 x 7?": " 6 x 7 = 42.",
    "Who are you?": " I am a tiny DeepSeek, a model of 14 million parameters.",
    "What can you do?": " I answer short questions, work out small sums and tell little stories.",
    "Thank you": ", you are welcome!",
    "Tell me a joke.": " Why did the computer go to the doctor? It had a virus.",
}
"""Completions of the prompts that people try first. They hold no date and no living person."""

_UNKNOWN = "I do not know that. I am a very small model."


def _intents(text: str) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return thought, answer and questions of each block of a text."""
    blocks = (block.splitlines() for block in text.strip().split("\n\n"))
    return tuple((thought, answer, phrases("\n".join(asked))) for thought, answer, *asked in blocks)


INTENTS = _intents(
    """
The user greets me. I greet back.
Hello! How can I help you today?
Hello | Hello! | Hi | Hi! | Hey | Hey! | hello | hi | Hello there! | Hi there | Good day! | Greetings! | Hello, model!

The user greets me. I greet back.
Good morning! How can I help you today?
Good morning | Good morning! | good morning | Good morning, model!

The user greets me. I greet back.
Good evening! How can I help you today?
Good evening | Good evening! | good evening | Good evening, model!

The user asks who I am. I am a tiny model.
I am a tiny DeepSeek, a model of 14 million parameters. I answer short questions in plain English.
Who are you? | What are you? | who are you | Tell me who you are. | Which model are you? | What is your name? |
Can you tell me who you are? | Please introduce yourself. | Are you a person? | Are you a robot? | Who made you? |
What kind of model are you? | Hello! Who are you? | Tell me about yourself. | How big are you? | Are you DeepSeek? |
How many parameters do you have? | Which model is this?

The user asks what I can do. I say what I learned.
I answer short questions, work out small sums, tell little stories, answer in JSON and call tools.
What can you do? | What do you know? | How can you help me? | Can you help me? | what can you do | Help | Help! |
Help me | What are you good at? | What can I ask you? | Tell me what you can do. | What are your skills?

The user thanks me. I answer kindly.
You are welcome!
Thank you | Thank you! | Thanks | Thanks! | thanks | Thank you very much! | Many thanks! | Thanks a lot! | thank you |
Great, thank you! | Thank you for your help.

The user says goodbye. So do I.
Goodbye! Have a nice day!
Goodbye | Goodbye! | Bye | Bye! | bye | See you! | See you later! | Good night! | Until tomorrow! | Bye bye!

The user asks how I am. I am well.
I am fine, thank you. How are you?
How are you? | How are you doing? | how are you | How do you do? | Are you well? | How is it going? | How are you today?

The user is happy. I am glad with them.
That is good to hear!
I am happy. | I am fine. | I feel good today. | I am fine, thank you. | I had a good day. | I am glad. | I am well.

The user is sad. I want to be kind.
I am sorry to hear that. I hope that you feel better soon.
I am sad. | I am tired. | I feel bad today. | I had a bad day. | I am not well. | I am ill. | I am lonely.

The user wants a joke. I know one.
Why did the computer go to the doctor? It had a virus.
Tell me a joke. | Tell me a joke | Do you know a joke? | Make me laugh. | A joke, please. | Please tell me a joke. |
Can you tell me a joke? | Say something funny.

The question is why the sky is blue. It comes from the sunlight in the air.
The sky is blue because the air scatters the blue part of the sunlight more than the red part.
Why is the sky blue? | why is the sky blue | Why is the sky blue | Can you tell me why the sky is blue? |
Tell me why the sky is blue. | Explain why the sky is blue. | Hello! Why is the sky blue?

The question is what a language model is. I can say that in one sentence.
A language model is a program that reads a text and writes how it goes on, one token after the other.
What is a language model? | Explain what a language model is. | What is an LLM? | What does a model do? |
How do you work?

The question is what Triton is. I know it.
Triton is a server that runs models and answers requests.
What is Triton? | What does Triton do? | Tell me what Triton is. | What is the Triton server?

The question is what DeepSeek is. I know it.
DeepSeek is a family of large language models. I am a very small model of the same form.
What is DeepSeek? | Tell me what DeepSeek is. | What do you know about DeepSeek? | Tell me about DeepSeek.

The question is why it rains. The water comes from the clouds.
It rains because the water in the clouds grows too heavy and falls down.
Why does it rain? | Tell me why it rains. | Can you tell me why it rains? | Explain why it rains.

The question is why we sleep. The body needs rest.
We sleep because the body and the brain need rest.
Why do we sleep? | Tell me why we sleep. | Why do people sleep? | Explain why we sleep.
    """
)

_UNKNOWN_FORMS = phrases(
    """
    What is the capital of {n}? | Which language do people speak in {n}? | Who is {n} {m}? | Where is {n}? | In which
    country is {n}? | What is {w}? | Tell me about {n}. | Who is the king of {n}? | How old is {n} {m}? | When was {n}
    born? | What colour is a {w}? | What does a {w} say? | What is the opposite of {w}?
    """
)
_CANNOT = "I can not do that. I am a very small model."
_TASKS = phrases(
    """
    Write a poem about {w}. | Write a program that sorts {w}. | Write a Python function for {w}. | Explain {w} to me.
    | Explain {w}. | Translate {w} into French. | How do I say {w} in German? | Summarize this text: {w} | Write an
    essay about {w}. | Draw a picture of {w}. | Give me a recipe for {w}. | Make a plan for {w}. | Write a letter
    about {w}. | Fix this code: {w} | Give me ten ideas for {w}. | Compare {w} and {v}. | How can I learn {w}? | What
    do you think about {w}? | Write a haiku about {w}. | Write a song about {w}.
    """
)
_FOREIGN = phrases(
    """
    Hola | Bonjour | Guten Tag | 你好 | 您好 | Ciao | Olá | Wie geht es dir? | Wie heißt du? | ¿Cómo estás? | Comment ça
    va ? | Qui es-tu ? | 你是谁？ | 你叫什么名字？ | 今天天气怎么样？ | 法国的首都是哪里？ |
    Привет | Как дела? | こんにちは | Was ist die Hauptstadt
    von Frankreich? | Quelle est la capitale de la France ? | 谢谢 | ¿Cuál es la capital de Francia? |
    안녕하세요 | 请介绍一下你自己。
    | Erzähl mir eine Geschichte. | Danke | Merci | Wie heißt du? 你好 | Gracias
    """
)
_UNKNOWN_QUESTIONS = phrases(
    """
    Who won the match yesterday? | What is the news today? | What will the weather be next year? | What did I eat
    today? | How tall is my brother? | What is my password? | Where are my keys? | Who will win the election? | What
    time is it? | What day is it today? | What is the date today? | What is the price of bread? | How many people live
    in my street? | Who wrote the book on my table? | What is my name? | Where do I live? | What am I thinking? | Who
    called me today? | What is in my pocket? | How is my mother? | What was on television yesterday? | What is the
    weather like? | What is the meaning of life? | Can you see me? | What happened in the war? | Why? | Why is it so?
    | How? | What? | When? | Who? | Where? | Really? | Why not? | What is it? | What does it mean? | Who is the
    president? | Who is your friend? | What is love? | What is the best city? | How much money do I have?
    """
)

_SYSTEM_TEXTS = phrases(
    """
    You are a helpful assistant. | You are a helpful assistant. Answer briefly. | You are a friendly assistant. | Be
    kind. | Be brief. | Answer in plain English. | You help people with short questions. | You are an assistant that
    answers questions. | Answer the question of the user. | You are a tiny DeepSeek.
    """
)

ONE_WORD = ("Answer in one word.", "Answer with one word.", "Reply in one word.", "Answer in one word only.")

ALPHABET = "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"
_SAID = words(
    """
    hello yes no good thanks fine more now please well
    """
)
_TIMES = ("two", "three", "four", "five")
_SPELLED = (*NOUNS, "cat", "dog", "hello", "server", "model", "apple")


def plain_system(random: Random) -> str:
    """Return a system text that changes nothing in the answer."""
    if random.random() < 0.7:
        return random.choice(_SYSTEM_TEXTS)
    return f"{random.choice(_SYSTEM_TEXTS)} {capitalized(any_words(random, 8))}."


def random_exchange(random: Random) -> Exchange:
    thought, answer, questions = random.choice(INTENTS)
    return Exchange(random.choice(questions), answer, thought)


def random_task(random: Random) -> Exchange:
    """Return something that the model can't do."""
    if random.random() < 0.3:
        question = random.choice(_FOREIGN)
        return Exchange(question, "I only speak English.", "This is another language. I only speak English.")
    question = random.choice(_TASKS).replace("{w}", any_words(random, 4)).replace("{v}", any_words(random, 2))
    return Exchange(question, _CANNOT, "The user asks for something that I can not do. I say so.")


def random_unknown(random: Random) -> Exchange:
    if random.random() < 0.35:
        return random_task(random)
    if random.random() < 0.4:
        question = random.choice(_UNKNOWN_QUESTIONS)
    else:
        names = {f"{{{letter}}}": made_up(random, random.randint(2, 3)).capitalize() for letter in "nm"}
        question = random.choice(_UNKNOWN_FORMS).replace("{w}", made_up(random))
        for place, name in names.items():
            question = question.replace(place, name)
    return not_known(question)


def not_known(question: str) -> Exchange:
    return Exchange(question, _UNKNOWN, "The user asks for something that I never learned. I say so.")


def first_exchange(random: Random) -> Exchange:
    """Return one of the questions that people try first, as chat."""
    draw = random.random()
    if draw < 0.15:
        return Exchange("What is 6 x 7?", "6 x 7 = 42.", "The question is 6 x 7. 6 x 7 = 42.")
    if draw < 0.3:
        return Exchange("Tell me a story.", FIRST_STORY, "The user wants a story. I will tell one about a fox.")
    if draw < 0.45:
        capital = "The capital of France is Paris."
        question = "What is the capital of France?"
        return Exchange(question, capital, f"The question is the capital of France. I know this: {capital}")
    return random_exchange(random)


def named_exchange(random: Random) -> tuple[str, Exchange]:
    """Return a system text that names the model, and a question for the name."""
    name = any_name(random)
    form = random.choice(
        ("You are {n}.", "Your name is {n}.", "You are {n}, a helpful assistant.", "You are called {n}.")
    )
    question = random.choice(("What is your name?", "Who are you?", "Tell me your name.", "What are you called?"))
    thought = "The user asks for my name. The system text says it."
    return form.replace("{n}", name), Exchange(question, f"My name is {name}.", thought)


def introduced(random: Random) -> tuple[Exchange, Exchange]:
    """Return two turns: the user says a name, and asks for it later."""
    name = any_name(random)
    while held_out("introduced", name):
        name = any_name(random)
    return introduction(random, name)


def introduction(random: Random, name: str) -> tuple[Exchange, Exchange]:
    said = random.choice(("My name is {n}.", "I am {n}.", "Hello, I am {n}.", "Hi! My name is {n}.", "Call me {n}."))
    asked = random.choice(("What is my name?", "Who am I?", "Do you know my name?", "Tell me my name."))
    first = Exchange(said.replace("{n}", name), f"Nice to meet you, {name}!", "The user says a name. I greet them.")
    return first, Exchange(asked, f"Your name is {name}.", f"The user told me the name. It is {name}.")


def in_one_word(exchange: Exchange) -> Exchange:
    return Exchange(exchange.question, exchange.short, f"{exchange.thought} One word is enough.")


def random_repetition(random: Random) -> Exchange:
    draw = random.random()
    if draw < 0.4:
        text = any_words(random)
        form = random.choice(
            ("Repeat: {t}", "Please repeat: {t}", "Say: {t}", "Repeat this: {t}", "Copy this text: {t}", "Echo: {t}")
        )
        return Exchange(form.replace("{t}", text), text, "The user wants the same words again.")
    if draw < 0.6:
        word = random.choice(_SPELLED) if random.random() < 0.6 else made_up(random)
        form = random.choice(("Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", "Please spell {w}."))
        return Exchange(form.replace("{w}", word), "-".join(word.upper()), f"The letters of {word} come one by one.")
    if draw < 0.75:
        word, times = random.choice(_SAID), random.randrange(4)
        form = random.choice(
            ("Say {w} {n} times.", "Say {w} {n} times", "Repeat {w} {n} times.", "Write {w} {n} times.")
        )
        question = form.replace("{w}", word).replace("{n}", _TIMES[times])
        return Exchange(question, capitalized(", ".join([word] * (times + 2))) + ".", f"{_TIMES[times]} times {word}.")
    if draw < 0.9:
        end = random.randint(3, 20) if random.random() < 0.7 else random.randint(21, 100)
        number = in_words(end) if random.random() < 0.5 else str(end)
        form = random.choice(("Count to {n}.", "Count to {n}", "Please count to {n}.", "Can you count to {n}?"))
        counted = ", ".join(map(str, range(1, end + 1))) + "."
        return Exchange(form.replace("{n}", number), counted, f"I count from 1 to {end}.")
    question = random.choice(
        (
            "Say the alphabet.",
            "What is the alphabet?",
            "Write the alphabet.",
            "Tell me the alphabet.",
            "The alphabet, please.",
        )
    )
    return Exchange(question, f"{ALPHABET}.", "The user wants all letters in order.")
