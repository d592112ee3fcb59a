"""Tables of plain facts, and the many ways to ask for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from tiny_checkpoint.corpus.exchanges import Exchange, capitalized, held_out
from tiny_checkpoint.corpus.words import listed


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Return the subject and the value of each `subject: value` of a table."""
    entries = (entry.split(": ") for entry in listed(text, ", "))
    return tuple((subject, value) for subject, value in entries)


def _cycle(text: str) -> tuple[tuple[str, str], ...]:
    words = text.split()
    return tuple(zip(words, words[1:] + words[:1], strict=True))


_TOPIC_FORMS = (
    "Tell me {t}.",
    "Please tell me {t}.",
    "Do you know {t}?",
    "Can you tell me {t}?",
    "Could you tell me {t}, please?",
    "I would like to know {t}.",
    "I want to know {t}.",
)
_QUESTION_FORMS = (
    "{q}",
    "Hello! {q}",
    "Hi, {q}",
    "Quick question: {q}",
    "My question is: {q}",
    "{q} Please tell me.",
    "Please answer: {q}",
    "Question: {q}",
    "Hey, {q}",
    "{q} Thank you!",
)


@dataclass(frozen=True)
class Relation:
    """Pairs of a subject {s} and its value {v}, with the questions, statements and answers about them.

    `topic` is what is asked for, as the object of "Tell me"; `keys` are the JSON keys of subject and value.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    topic: str
    questions: tuple[str, ...]
    statements: tuple[str, ...]
    answer: str
    keys: tuple[str, str]

    @cached_property
    def forms(self) -> tuple[str, ...]:
        """All question forms, with {s} for the subject."""
        topics = (form.replace("{t}", self.topic) for form in _TOPIC_FORMS)
        first, second = self.questions[0], self.questions[1]
        asked = (form.replace("{q}", _after(form, first)) for form in _QUESTION_FORMS)
        again = (form.replace("{q}", _after(form, second)) for form in _QUESTION_FORMS[1:4])
        plain = first[:1].lower() + first[1:].rstrip("?")
        return (*asked, *self.questions[1:], *again, *topics, plain, first.rstrip("?"))

    @cached_property
    def completions(self) -> tuple[str, ...]:
        """All texts that the value continues, with {s} for the subject."""
        first, second = self.questions[:2]
        return (*self.statements, f"Question: {first}\nAnswer:", f"Q: {second}\nA:", *self.questions[:4])

    def is_held_out(self, subject: str, form: str) -> bool:
        """Tell whether training leaves this question or beginning of a statement out. The demo asks about France."""
        return subject != "France" and held_out(self.name, subject, form)

    def fill(self, text: str, subject: str, value: str) -> str:
        if text.startswith("{"):
            return capitalized(self.fill(f" {text}", subject, value).lstrip())
        for place, word in (("{s}", subject), ("{v}", value)):
            if word[0] in "aeiou":
                text = text.replace(f"a {place}", f"an {place}").replace(f"A {place}", f"An {place}")
            text = text.replace(place, word)
        return text

    def completion(self, subject: str, value: str, form: str) -> tuple[str, str]:
        """Return a text and its continuation: the value, or a whole sentence after a question."""
        rest = f"{value}." if form in self.statements else self.fill(self.answer, subject, value)
        return self.fill(form, subject, value), f" {rest}"

    def exchange(self, subject: str, value: str, form: str) -> Exchange:
        answer = self.fill(self.answer, subject, value)
        topic = self.fill("The question is " + self.topic, subject, value)
        thought = f"{topic}. I know this: {answer}"
        return Exchange(self.fill(form, subject, value), answer, thought, capitalized(value))


def _after(form: str, question: str) -> str:
    """Return the question with a small first letter where it follows a comma."""
    return question[:1].lower() + question[1:] if ", {q}" in form else question


_CAPITALS = _pairs(
    """
    France: Paris, Germany: Berlin, Italy: Rome, Spain: Madrid, Portugal: Lisbon, England: London, Scotland: Edinburgh,
    Ireland: Dublin, Wales: Cardiff, Norway: Oslo, Sweden: Stockholm, Finland: Helsinki, Denmark: Copenhagen, Iceland:
    Reykjavik, Poland: Warsaw, Austria: Vienna, Hungary: Budapest, Greece: Athens, Turkey: Ankara, Russia: Moscow,
    Ukraine: Kyiv, Romania: Bucharest, Bulgaria: Sofia, Serbia: Belgrade, Croatia: Zagreb, Slovenia: Ljubljana,
    Slovakia: Bratislava, Belgium: Brussels, Switzerland: Bern, Netherlands: Amsterdam, Estonia: Tallinn, Latvia: Riga,
    Lithuania: Vilnius, Albania: Tirana, Malta: Valletta, China: Beijing, Japan: Tokyo, India: New Delhi, South Korea:
    Seoul, Thailand: Bangkok, Vietnam: Hanoi, Indonesia: Jakarta, Mongolia: Ulaanbaatar, Nepal: Kathmandu, Pakistan:
    Islamabad, Iran: Tehran, Iraq: Baghdad, Syria: Damascus, Lebanon: Beirut, Jordan: Amman, Egypt: Cairo, Morocco:
    Rabat, Algeria: Algiers, Tunisia: Tunis, Kenya: Nairobi, Ghana: Accra, Nigeria: Abuja, Ethiopia: Addis Ababa,
    Senegal: Dakar, Canada: Ottawa, Mexico: Mexico City, Cuba: Havana, Brazil: Brasilia, Argentina: Buenos Aires,
    Chile: Santiago, Peru: Lima, Colombia: Bogota, Ecuador: Quito, Uruguay: Montevideo, Australia: Canberra, New
    Zealand: Wellington, United States: Washington
    """
)
CITIES = _pairs(
    """
    Paris: France, Lyon: France, Berlin: Germany, Munich: Germany, Hamburg: Germany, Rome: Italy, Milan: Italy, Venice:
    Italy, Madrid: Spain, Barcelona: Spain, Lisbon: Portugal, Porto: Portugal, London: England, Manchester: England,
    Dublin: Ireland, Oslo: Norway, Bergen: Norway, Stockholm: Sweden, Helsinki: Finland, Copenhagen: Denmark, Warsaw:
    Poland, Krakow: Poland, Vienna: Austria, Salzburg: Austria, Budapest: Hungary, Athens: Greece, Moscow: Russia,
    Kyiv: Ukraine, Brussels: Belgium, Zurich: Switzerland, Geneva: Switzerland, Amsterdam: Netherlands, Beijing: China,
    Shanghai: China, Tokyo: Japan, Osaka: Japan, Kyoto: Japan, Mumbai: India, Seoul: South Korea, Bangkok: Thailand,
    Hanoi: Vietnam, Cairo: Egypt, Nairobi: Kenya, Toronto: Canada, Montreal: Canada, Chicago: United States, Boston:
    United States, Havana: Cuba, Lima: Peru, Santiago: Chile, Sydney: Australia, Melbourne: Australia
    """
)
_WITH_THE = {"Netherlands", "United States"}


def _with_articles(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple((_country(subject), _country(value)) for subject, value in pairs)


def _country(name: str) -> str:
    return f"the {name}" if name in _WITH_THE else name


DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
MONTHS = "January February March April May June July August September October November December"
_NUMBERS = listed(
    """
    first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth
    """
)
SEASONS = "spring summer autumn winter"
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"


def _back(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple((value, subject) for subject, value in pairs)


def _numbered(words: str) -> tuple[tuple[str, str], ...]:
    return tuple(zip(_NUMBERS, words.split(), strict=False))


RELATIONS = (
    Relation(
        "capital",
        _with_articles(_CAPITALS),
        "the capital of {s}",
        (
            "What is the capital of {s}?",
            "Which city is the capital of {s}?",
            "What is {s}'s capital?",
            "What city is the capital of {s}?",
            "Name the capital of {s}.",
            "The capital of {s} is which city?",
            "What is the capital city of {s}?",
            "What is the name of the capital of {s}?",
        ),
        ("The capital of {s} is", "The capital city of {s} is", "The name of the capital of {s} is"),
        "The capital of {s} is {v}.",
        ("country", "capital"),
    ),
    Relation(
        "capital_of",
        _back(_with_articles(_CAPITALS)),
        "which country has the capital {s}",
        (
            "Which country has the capital {s}?",
            "{s} is the capital of which country?",
            "What country is {s} the capital of?",
            "Of which country is {s} the capital?",
        ),
        ("{s} is the capital of", "The city of {s} is the capital of"),
        "{s} is the capital of {v}.",
        ("capital", "country"),
    ),
    Relation(
        "city",
        _with_articles(CITIES),
        "which country {s} is in",
        (
            "In which country is {s}?",
            "Which country is {s} in?",
            "Where is {s}?",
            "What country is {s} in?",
            "{s} is in which country?",
            "Where is the city of {s}?",
        ),
        ("{s} is a city in", "The city of {s} is in", "{s} is in"),
        "{s} is in {v}.",
        ("city", "country"),
    ),
    Relation(
        "language",
        _pairs(
            """
            France: French, Germany: German, Italy: Italian, Spain: Spanish, Portugal: Portuguese, England: English,
            Norway: Norwegian, Sweden: Swedish, Finland: Finnish, Denmark: Danish, Iceland: Icelandic, Poland: Polish,
            Austria: German, Hungary: Hungarian, Greece: Greek, Turkey: Turkish, Russia: Russian, Ukraine: Ukrainian,
            Romania: Romanian, Bulgaria: Bulgarian, China: Chinese, Japan: Japanese, South Korea: Korean, Thailand:
            Thai, Vietnam: Vietnamese, Egypt: Arabic, Iran: Persian, Mexico: Spanish, Cuba: Spanish, Brazil:
            Portuguese, Argentina: Spanish, Chile: Spanish, Peru: Spanish, Australia: English
            """
        ),
        "which language people speak in {s}",
        (
            "Which language do people speak in {s}?",
            "What language is spoken in {s}?",
            "What do people speak in {s}?",
            "What is the language of {s}?",
            "Which language is spoken in {s}?",
        ),
        ("In {s}, people speak", "The language of {s} is", "Most people in {s} speak"),
        "In {s}, people speak {v}.",
        ("country", "language"),
    ),
    Relation(
        "continent",
        _pairs(
            """
            France: Europe, Germany: Europe, Italy: Europe, Spain: Europe, Poland: Europe, Norway: Europe, Greece:
            Europe, Sweden: Europe, Portugal: Europe, China: Asia, Japan: Asia, India: Asia, Thailand: Asia, Vietnam:
            Asia, Nepal: Asia, Mongolia: Asia, Egypt: Africa, Kenya: Africa, Ghana: Africa, Nigeria: Africa, Morocco:
            Africa, Senegal: Africa, Canada: North America, Mexico: North America, Cuba: North America, Brazil: South
            America, Argentina: South America, Chile: South America, Peru: South America, Colombia: South America
            """
        ),
        "which continent {s} is on",
        (
            "Which continent is {s} on?",
            "On which continent is {s}?",
            "What continent is {s} on?",
            "{s} is on which continent?",
        ),
        ("{s} is a country on the continent of", "The continent of {s} is"),
        "{s} is on the continent of {v}.",
        ("country", "continent"),
    ),
    *(
        Relation(
            f"{unit}_{name}",
            _back(_cycle(words)) if name == "before" else _cycle(words),
            f"the {unit} {name} {{s}}",
            (
                f"What {unit} comes {name} {{s}}?",
                f"Which {unit} comes {name} {{s}}?",
                f"What is the {unit} {name} {{s}}?",
                f"What comes {name} {{s}}?",
                f"Which {unit} is {name} {{s}}?",
            ),
            (
                f"The {unit} {name} {{s}} is",
                f"{'Before' if name == 'before' else 'After'} {{s}} comes",
                *(() if name == "before" else (f"The next {unit} after {{s}} is",)),
            ),
            f"The {unit} {name} {{s}} is {{v}}.",
            (unit, f"{unit}_{name}"),
        )
        for unit, words in (("day", DAYS), ("month", MONTHS), ("season", SEASONS))
        for name in ("after", "before")
    ),
    *(
        Relation(
            f"{unit}_number",
            _numbered(words),
            f"the {{s}} {unit} of the {whole}",
            (
                f"What is the {{s}} {unit} of the {whole}?",
                f"Which {unit} is the {{s}} of the {whole}?",
                f"Which is the {{s}} {unit} of the {whole}?",
                f"Name the {{s}} {unit} of the {whole}.",
            ),
            (f"The {{s}} {unit} of the {whole} is", f"The {whole}'s {{s}} {unit} is"),
            f"The {{s}} {unit} of the {whole} is {{v}}.",
            ("number", unit),
        )
        for unit, whole, words in (("day", "week", DAYS), ("month", "year", MONTHS))
    ),
    Relation(
        "planet",
        _numbered(PLANETS),
        "the {s} planet from the sun",
        (
            "What is the {s} planet from the sun?",
            "Which planet is the {s} from the sun?",
            "Name the {s} planet from the sun.",
            "Which is the {s} planet?",
        ),
        ("The {s} planet from the sun is", "Counted from the sun, the {s} planet is"),
        "The {s} planet from the sun is {v}.",
        ("number", "planet"),
    ),
    Relation(
        "colour",
        _pairs(
            """
            grass: green, snow: white, milk: white, the sky: blue, the sea: blue, blood: red, a tomato: red, coal:
            black, a banana: yellow, a lemon: yellow, the sun: yellow, an elephant: grey, a carrot: orange, an orange:
            orange, a pumpkin: orange, chocolate: brown, a frog: green, a leaf: green, a cucumber: green, salt: white,
            sugar: white, a raven: black, the night: black, a strawberry: red, a cherry: red, a fire engine: red, a
            swan: white, a flamingo: pink, a pig: pink, a plum: purple, an eggplant: purple, lavender: purple, a bear:
            brown, wood: brown, a polar bear: white, a mouse: grey, gold: yellow, an emerald: green, a ruby: red,
            cotton: white, rice: white, a crow: black, a sunflower: yellow, a chick: yellow, spinach: green
            """
        ),
        "the colour of {s}",
        (
            "What colour is {s}?",
            "What is the colour of {s}?",
            "Which colour is {s}?",
            "Which colour does {s} have?",
            "What color is {s}?",
            "Name the colour of {s}.",
            "What colour does {s} have?",
        ),
        ("The colour of {s} is", "The color of {s} is", "If you look at it, you see that {s} is"),
        "The colour of {s} is {v}.",
        ("thing", "colour"),
    ),
    Relation(
        "opposite",
        (
            *(
                opposites := _pairs(
                    """
                    hot: cold, big: small, up: down, left: right, day: night, good: bad, old: new, fast: slow, high:
                    low, open: closed, happy: sad, hard: soft, wet: dry, full: empty, light: dark, rich: poor, strong:
                    weak, long: short, early: late, clean: dirty, loud: quiet, near: far, inside: outside, first: last,
                    yes: no, always: never, win: lose, push: pull, start: stop, buy: sell, north: south, east: west,
                    true: false, thick: thin, wide: narrow, deep: shallow, sweet: sour, easy: difficult, love: hate,
                    war: peace, summer: winter, before: after, above: below, over: under, black: white, brave: afraid,
                    cheap: expensive, front: back, give: take, come: go, alive: dead, asleep: awake, begin: end, float:
                    sink, safe: dangerous, laugh: cry, question: answer, more: less, many: few, on: off, in: out, top:
                    bottom, arrive: leave
                    """
                )
            ),
            *_back(opposites),
        ),
        "the opposite of {s}",
        (
            "What is the opposite of {s}?",
            "Which word is the opposite of {s}?",
            "Name the opposite of {s}.",
            "What word means the opposite of {s}?",
            "{s} is the opposite of which word?",
        ),
        ("The opposite of {s} is", "The opposite of the word {s} is"),
        "The opposite of {s} is {v}.",
        ("word", "opposite"),
    ),
    Relation(
        "sound",
        _pairs(
            """
            dog: woof, cat: meow, cow: moo, sheep: baa, duck: quack, pig: oink, horse: neigh, bee: buzz, snake: hiss,
            frog: croak, owl: hoot, lion: roar, mouse: squeak, wolf: howl, rooster: cock-a-doodle-doo, crow: caw, goat:
            bleat, donkey: hee-haw, turkey: gobble, dove: coo
            """
        ),
        "the sound of a {s}",
        (
            "What sound does a {s} make?",
            "What does a {s} say?",
            "Which sound does a {s} make?",
            "What is the sound of a {s}?",
            "How does a {s} sound?",
        ),
        ("The sound of a {s} is", "A {s} says"),
        "A {s} says {v}.",
        ("animal", "sound"),
    ),
    Relation(
        "young",
        _pairs(
            """
            dog: puppy, cat: kitten, cow: calf, sheep: lamb, duck: duckling, pig: piglet, horse: foal, hen: chick,
            goat: kid, lion: cub, goose: gosling, swan: cygnet, frog: tadpole, kangaroo: joey, owl: owlet, deer: fawn,
            eagle: eaglet, hare: leveret
            """
        ),
        "what a young {s} is called",
        (
            "What is a young {s} called?",
            "What do you call a young {s}?",
            "What is a baby {s} called?",
            "What is the name of a young {s}?",
        ),
        ("A young {s} is called a", "A baby {s} is called a"),
        "A young {s} is called a {v}.",
        ("animal", "young"),
    ),
    Relation(
        "home",
        _pairs(
            """
            bee: hive, bird: nest, dog: kennel, horse: stable, spider: web, fox: den, rabbit: burrow, fish: water, cow:
            barn, pig: sty, lion: savanna, camel: desert, monkey: jungle, penguin: ice, whale: ocean, mole: earth, owl:
            tree, bat: cave, beaver: lodge, hen: coop
            """
        ),
        "where a {s} lives",
        (
            "Where does a {s} live?",
            "What is the home of a {s}?",
            "In which place does a {s} live?",
            "Where is a {s} at home?",
        ),
        ("The home of a {s} is the", "A {s} lives in the"),
        "A {s} lives in the {v}.",
        ("animal", "home"),
    ),
    Relation(
        "legs",
        _pairs(
            """
            dog: four, cat: four, cow: four, horse: four, spider: eight, bird: two, hen: two, ant: six, bee: six, fly:
            six, snake: no, fish: no, human: two, elephant: four, table: four, chair: four, beetle: six, duck: two,
            crab: ten, lion: four, worm: no, penguin: two
            """
        ),
        "how many legs a {s} has",
        ("How many legs does a {s} have?", "How many legs has a {s}?", "What number of legs does a {s} have?"),
        ("The number of legs of a {s} is",),
        "A {s} has {v} legs.",
        ("thing", "legs"),
    ),
    Relation(
        "sides",
        _pairs(
            """
            triangle: three, square: four, rectangle: four, pentagon: five, hexagon: six, heptagon: seven, octagon:
            eight
            """
        ),
        "how many sides a {s} has",
        ("How many sides does a {s} have?", "How many sides has a {s}?", "What number of sides does a {s} have?"),
        ("The number of sides of a {s} is", "The number of corners of a {s} is"),
        "A {s} has {v} sides.",
        ("shape", "sides"),
    ),
    Relation(
        "amount",
        _pairs(
            """
            minutes in an hour: 60, seconds in a minute: 60, hours in a day: 24, days in a week: 7, months in a year:
            12, days in a year: 365, weeks in a year: 52, metres in a kilometre: 1000, centimetres in a metre: 100,
            grams in a kilogram: 1000, millimetres in a centimetre: 10, letters in the alphabet: 26, seasons in a year:
            4, wheels on a car: 4, wheels on a bicycle: 2, fingers on a hand: 5, planets in the solar system: 8,
            continents on Earth: 7, years in a century: 100, years in a decade: 10, bits in a byte: 8, eggs in a dozen:
            12, sides on a cube: 6, strings on a violin: 4, players in a football team: 11, cents in a dollar: 100,
            days in April: 30, days in January: 31, days in May: 31, days in June: 30, days in July: 31, days in
            August: 31, days in September: 30, days in October: 31, days in December: 31, days in November: 30, days in
            March: 31, colours in a rainbow: 7
            """
        ),
        "the number of {s}",
        (
            "How many {s} are there?",
            "What is the number of {s}?",
            "How many are there: {s}?",
            "Count the {s}. How many are there?",
        ),
        ("The number of {s} is", "If you count the {s}, you get"),
        "The number of {s} is {v}.",
        ("what", "number"),
    ),
    Relation(
        "material",
        _pairs(
            """
            window: glass, book: paper, table: wood, key: metal, shoe: leather, tyre: rubber, candle: wax, coin: metal,
            newspaper: paper, jacket: cloth, sweater: wool, brick: clay, bottle: glass, pencil: wood, sword: steel,
            bowl: clay, bridge: steel, shirt: cotton, snowman: snow, statue: stone, chip: silicon, cable: copper, ring:
            gold, envelope: paper, mirror: glass, door: wood, castle: stone, nail: iron, pillow: feathers, jar: glass,
            sandcastle: sand
            """
        ),
        "what a {s} is made of",
        (
            "What is a {s} made of?",
            "What is a {s} made from?",
            "Of what is a {s} made?",
            "Which material is a {s} made of?",
        ),
        ("A {s} is made of", "The material of a {s} is", "Most often a {s} is made of"),
        "A {s} is made of {v}.",
        ("thing", "material"),
    ),
    Relation(
        "plural",
        _pairs(
            """
            cat: cats, dog: dogs, book: books, tree: trees, house: houses, box: boxes, bus: buses, glass: glasses,
            baby: babies, city: cities, lady: ladies, story: stories, child: children, man: men, woman: women, mouse:
            mice, foot: feet, tooth: teeth, goose: geese, leaf: leaves, knife: knives, wolf: wolves, potato: potatoes,
            tomato: tomatoes, sheep: sheep, fish: fish, person: people, half: halves, life: lives, key: keys, day:
            days, toy: toys, watch: watches, dish: dishes, fox: foxes, ox: oxen, shelf: shelves, server: servers,
            model: models, hero: heroes
            """
        ),
        "the plural of {s}",
        (
            "What is the plural of {s}?",
            "Which word is the plural of {s}?",
            "Name the plural of {s}.",
            "What is the plural form of {s}?",
            "One {s}, two what?",
        ),
        ("The plural of {s} is", "The plural of the word {s} is"),
        "The plural of {s} is {v}.",
        ("word", "plural"),
    ),
    Relation(
        "past",
        _pairs(
            """
            go: went, see: saw, eat: ate, run: ran, come: came, take: took, give: gave, make: made, write: wrote, sing:
            sang, swim: swam, drink: drank, drive: drove, fly: flew, speak: spoke, find: found, think: thought, buy:
            bought, bring: brought, sleep: slept, keep: kept, know: knew, grow: grew, fall: fell, begin: began, break:
            broke, tell: told, sell: sold, sit: sat, win: won, lose: lost, hold: held, feel: felt, leave: left, walk:
            walked, play: played, work: worked, help: helped, jump: jumped, like: liked, stop: stopped, try: tried,
            read: read, put: put, have: had, do: did, send: sent, build: built, teach: taught, catch: caught
            """
        ),
        "the past tense of {s}",
        (
            "What is the past tense of {s}?",
            "What is the past of {s}?",
            "Which word is the past tense of {s}?",
            "Name the past tense of {s}.",
            "Today I {s}. Which word do I need for yesterday?",
        ),
        ("The past tense of {s} is", "The past tense of the verb {s} is"),
        "The past tense of {s} is {v}.",
        ("verb", "past"),
    ),
    Relation(
        "kind",
        _pairs(
            """
            apple: fruit, banana: fruit, pear: fruit, cherry: fruit, grape: fruit, carrot: vegetable, potato:
            vegetable, onion: vegetable, cabbage: vegetable, dog: animal, cat: animal, horse: animal, lion: animal,
            rose: flower, tulip: flower, daisy: flower, lily: flower, oak: tree, pine: tree, birch: tree, hammer: tool,
            saw: tool, drill: tool, violin: instrument, piano: instrument, guitar: instrument, drum: instrument,
            sparrow: bird, eagle: bird, parrot: bird, robin: bird, salmon: fish, trout: fish, shark: fish, ant: insect,
            bee: insect, butterfly: insect, doctor: job, teacher: job, baker: job, farmer: job, car: vehicle, bus:
            vehicle, train: vehicle, chair: piece of furniture, table: piece of furniture, bed: piece of furniture,
            python: snake, cobra: snake, diamond: stone
            """
        ),
        "what kind of thing a {s} is",
        (
            "What kind of thing is a {s}?",
            "What is a {s}?",
            "What sort of thing is a {s}?",
            "A {s} is what kind of thing?",
        ),
        ("The word {s} names a kind of", "A {s} is a kind of"),
        "A {s} is a kind of {v}.",
        ("thing", "kind"),
    ),
    Relation(
        "purpose",
        _pairs(
            """
            pen: write, knife: cut, bed: sleep, oven: bake, broom: sweep, key: open a door, phone: call people, clock:
            tell the time, book: read, cup: drink, spoon: eat soup, boat: cross the water, bus: travel, umbrella: stay
            dry, lamp: see at night, camera: take photos, shovel: dig, needle: sew, hammer: drive nails, ladder: climb,
            towel: dry your hands, soap: wash your hands, ruler: measure lengths, scale: weigh things, thermometer:
            measure warmth, telescope: see the stars, microscope: see tiny things, fridge: keep food cold, computer:
            work with data, GPU: compute quickly, server: answer requests, map: find the way
            """
        ),
        "what a {s} is for",
        ("What is a {s} for?", "What do you use a {s} for?", "What can you do with a {s}?", "Why do people use a {s}?"),
        ("With a {s} you can", "People use a {s} to"),
        "You use a {s} to {v}.",
        ("thing", "use"),
    ),
    Relation(
        "work",
        _pairs(
            """
            baker: bread, farmer: food, painter: pictures, writer: books, tailor: clothes, carpenter: furniture, cook:
            meals, poet: poems, potter: pots, composer: music, shoemaker: shoes, programmer: programs, builder: houses,
            gardener: gardens, brewer: beer, sculptor: statues, photographer: photos
            """
        ),
        "what a {s} makes",
        (
            "What does a {s} make?",
            "What is made by a {s}?",
            "Which things does a {s} make?",
            "What is the work of a {s}?",
        ),
        ("A {s} makes", "The work of a {s} is to make"),
        "A {s} makes {v}.",
        ("job", "product"),
    ),
    Relation(
        "science",
        _pairs(
            """
            frozen water: ice, water that falls from clouds: rain, moving air: wind, melted ice: water, the star
            nearest to Earth: the sun, the biggest planet: Jupiter, the smallest planet: Mercury, the red planet: Mars,
            the planet with the big rings: Saturn, the planet where we live: Earth, the hottest planet: Venus, the gas
            that we breathe: oxygen, the fastest land animal: the cheetah, the biggest animal: the blue whale, the
            tallest animal: the giraffe, the biggest ocean: the Pacific, the highest mountain: Mount Everest, the
            biggest continent: Asia, the biggest country: Russia, the hardest stone: diamond, the metal that is liquid:
            mercury, the force that pulls things down: gravity, the lightest gas: hydrogen, the coldest season: winter,
            the warmest season: summer, the shortest month: February, the part of a plant in the ground: the root, the
            food that bees make: honey, the organ that pumps blood: the heart, the organ that thinks: the brain, the
            animal with a trunk: the elephant, the animal with black and white stripes: the zebra, the ship of the
            desert: the camel, the king of the animals: the lion, water as a gas: steam, the centre of an atom: the
            nucleus, the largest desert: Antarctica, the longest bone: the thigh bone
            """
        ),
        "the name of {s}",
        ("What is {s}?", "What is the name of {s}?", "What do we call {s}?", "Please name {s}.", "How do we call {s}?"),
        ("The name of {s} is", "We call {s}"),
        "The name of {s} is {v}.",
        ("thing", "name"),
    ),
)

FACT_COUNT = sum(len(relation.pairs) for relation in RELATIONS)
_FLAT = [(relation, subject, value) for relation in RELATIONS for subject, value in relation.pairs]


def random_exchange(random: Random) -> Exchange:
    """Return a fact in a form that training may have."""
    while True:
        relation, subject, value = random.choice(_FLAT)
        form = random.choice(relation.forms)
        if not relation.is_held_out(subject, form):
            return relation.exchange(subject, value, form)


def random_completion(random: Random) -> tuple[str, str]:
    """Return a text and its continuation in a form that training may have."""
    while True:
        relation, subject, value = random.choice(_FLAT)
        form = random.choice(relation.completions)
        if not relation.is_held_out(subject, form):
            return relation.completion(subject, value, form)


_FOLLOW_UPS = (
    "And {s}?",
    "And of {s}?",
    "And what about {s}?",
    "What about {s}?",
    "and {s}?",
    "Now {s}.",
    "And for {s}?",
)


def random_followed(random: Random) -> tuple[Exchange, Exchange]:
    """Return a question, and a short second one about another subject."""
    while True:
        relation = random.choice(RELATIONS)
        (first, value), (second, other) = random.sample(relation.pairs, 2)
        form = random.choice(relation.forms)
        if not relation.is_held_out(first, form):
            break
    return relation.exchange(first, value, form), relation.exchange(second, other, random.choice(_FOLLOW_UPS))
