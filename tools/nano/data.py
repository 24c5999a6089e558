"""Training text of the nano model: recall stories and a small set of chat skills.

A document is a list of (text, weight) segments. Special tokens stand in the text under their own
names; weight says how much the loss on a segment counts: 1 for answers, CONTEXT for the rest.
"""
import random

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, UNTHINK = "<think>", "</think>"
SPECIALS = [BOS, EOS, "<｜▁pad▁｜>", USER, ASSISTANT, THINK, UNTHINK, "｜DSML｜",
            "<｜latest_reminder｜>"]
CONTEXT = 0.1

NAMES = """Alice Anton Bella Bob Boris Carla Clara Colin Dana Diego Edgar Elena Emil Fiona Felix
Greta Gwen Hanna Hugo Ida Igor Iris Ivan Jack Jonas Julia Karl Kira Lena Leo Lucas Maria Marta
Mina Nadia Nils Nora Oscar Otto Owen Paula Peter Priya Quinn Rosa Rufus Sara Simon Sofia Tara
Theo Tina Uma Victor Vera Wanda Willa Xenia Yara Zane""".split()

# The first training stages tell of few people, so that every name is practised often.
PEOPLE = """Bob Alice Clara Diego Elena Felix Greta Hugo Iris Jonas Kira Leo Marta Nadia Owen Priya
Quinn Rosa Simon Tara""".split()

ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen""".split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()

PLACES = """harbor market bakery library station garden bridge school theater mill castle museum
workshop kitchen tower chapel orchard stable cellar courtyard""".split()
THINGS = """lantern basket letter kettle ladder map coat bell clock ribbon hammer mirror barrel
umbrella blanket candle violin bucket ticket parcel""".split()
FOODS = "bread soup cheese honey apples pears fish cake tea butter".split()
ADJECTIVES = """old small red blue quiet heavy bright broken green golden wooden tall cold warm
empty""".split()
ANIMALS = "cat dog horse crow goat duck owl fox mouse goose".split()
WEATHER = ["rain", "fog", "wind", "snow", "sunlight", "a storm", "mist"]
TIMES = ["In the morning", "At noon", "Before supper", "After the rain", "That evening", "At dusk",
         "Near midnight", "The next day", "A little later", "On the way home"]


def words(n):
    """0..999 in English."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + ("-" + ONES[n % 10] if n % 10 else "")
    return ONES[n // 100] + " hundred" + (" " + words(n % 100) if n % 100 else "")


class Story:
    """Scenes of filler in which some people are assigned a number, and questions about it.

    In the templates N and M are different people, k is a number in words."""

    FILLER = [
        "{T}, {N} carried a {a} {o} to the {p}.",
        "{N} and {M} talked about the {o} near the {p}.",
        "The {p} was {a} and smelled of {f}.",
        "{T}, there was {w} over the {p}.",
        "A {n} slept beside the {a} {o}.",
        "{N} repaired the {o} while {M} made {f}.",
        "Nobody knew who had left the {o} at the {p}.",
        "{N} walked from the {p} to the {q} and said nothing.",
        "The {n} followed {N} across the {p}.",
        "{M} laughed, and the {a} {o} fell to the floor.",
        "{T}, {N} wrote a letter to {M} about the {n}.",
        "Everyone in the {p} wanted {f} and a {a} {o}.",
        "{N} looked for the {o} in the {q}, but found only {f}.",
        "The {o} was {a}, so {N} gave it to {M}.",
    ]
    NOISE = [                                            # numbers that do not count
        "{N} was {k} years old.",
        "{N} paid {k} coins for the {o}.",
        "It took {N} {k} steps to reach the {p}.",
        "{T}, {N} counted {k} boats from the {p}.",
        "{N} said that room {k} was {a}.",
        "{M} waited {k} minutes for {N} at the {p}.",
        "The {o} of {N} cost {k} coins.",
        "{N} guessed {k}, but the guess did not count.",
    ]
    FACT = [
        "{N} was assigned the number {k}.",
        "{N} was assigned the number {k}.",
        "{T}, {N} was assigned the number {k}.",
        "At the {p}, {N} was assigned the number {k}.",
        "In that scene, {N} was assigned the number {k}.",
        "{N} was assigned the number {k}, and the clerk wrote it down.",
        "{N} smiled when {N} was assigned the number {k}.",
    ]
    ECHO = [
        "{N} still had the number{k}.",
        "{N} wore the number{k} on a {a} coat.",
        "{M} asked, and {N} answered: the number{k}.",
        "The clerk called {N}, number{k}.",
    ]
    LEDGER = ["{N} was assigned {k}.", "{N} got the number {k}.", "{N} has number {k}.",
              "{N}: {k}."]
    INTRO = [
        "Read the story and remember the assigned numbers.",
        "Only assigned numbers count in this story.",
        "Here is a story with some assigned numbers.",
        "Read this long story with care.",
    ]
    ASK_ALL = [
        "List the assigned numbers for: {L}.",
        "Write Name=number for: {L}.",
        "People to list: {L}.",
    ]
    ASK_ONE = [
        "What number was {N} assigned?",
        "Which number did {N} get?",
        "List the assigned number for: {N}.",
    ]

    def __init__(self, rng, names=None):
        self.rng, self.names = rng, names or NAMES

    def sentence(self, templates, name=None, number=None):
        c = self.rng.choice
        n = name or c(self.names)
        m = c(self.names)
        while m == n:
            m = c(self.names)
        return c(templates).format(
            N=n, M=m, T=c(TIMES), a=c(ADJECTIVES), o=c(THINGS), p=c(PLACES), q=c(PLACES),
            f=c(FOODS), w=c(WEATHER), n=c(ANIMALS), k="{k}" if number is None else words(number))

    def facts(self, n):
        return {name: self.rng.randrange(10, 100) for name in self.rng.sample(self.names, n)}

    def scenes(self, facts, budget, count, noise, n_scenes=0):
        """Lists of sentences, one list per fact (n_scenes of them if that is more), about budget
        tokens together as measured by count(text)."""
        r = self.rng
        scenes = []
        for name, number in facts.items():
            s = [self.sentence(self.FACT, name, number)]
            if r.random() < noise:
                who = name if r.random() < 0.5 else None
                s.append(self.sentence(self.NOISE, who, r.randrange(10, 100)))
            r.shuffle(s)
            scenes.append(s)
        while len(scenes) < n_scenes:
            scenes.insert(r.randrange(len(scenes) + 1), [self.sentence(self.FILLER)])
        left = budget - sum(count(" " + x) for s in scenes for x in s)
        while left > 0:
            if r.random() < 0.12 * noise:
                x = self.sentence(self.NOISE, None, r.randrange(10, 100))
            else:
                x = self.sentence(self.FILLER)
            left -= count(" " + x)
            if left >= 0:
                s = r.choice(scenes)
                s.insert(r.randrange(len(s) + 1), x)
        return scenes

    def question(self, people, several):
        """people: whom to ask for, in this order."""
        if several:
            return self.rng.choice(self.ASK_ALL).format(L=", ".join(people))
        return self.rng.choice(self.ASK_ONE).format(N=people[0])

    def document(self, n_facts, budget, count, noise=0.5, ask_all=0.7, turns=1, echo=0.0,
                 ledger=0.0):
        """A training document and its facts. echo: chance that facts are mentioned again later,
        their number words trained with full weight; ledger: chance of a bare list of facts
        instead of a story. Both help early training and are off when recall is measured."""
        r = self.rng
        facts = self.facts(n_facts)
        if r.random() < ledger:
            template = [r.choice(self.LEDGER)]
            scenes = [[self.sentence(template, n, k)] for n, k in facts.items()]
        else:
            scenes = self.scenes(facts, budget - 40 - n_facts * 9 - turns * 30, count, noise)
            if r.random() < echo:
                for i, (name, k) in enumerate(facts.items()):
                    if r.random() < 0.6:
                        x = self.sentence(self.ECHO, name).replace("{k}", "\1 " + words(k) + "\1")
                        scenes[r.randrange(i, len(scenes))].append(x)
        story = ("\n".join(" ".join(s) for s in scenes) + "\n\n").split("\1")
        out = [(BOS + USER + r.choice(self.INTRO) + "\n\n" + story[0], CONTEXT)]
        out += [(x, CONTEXT if i % 2 else 1.0) for i, x in enumerate(story[1:])]
        for turn in range(turns):
            people, several = list(facts), r.random() < ask_all
            if several:
                if r.random() < 0.7:
                    r.shuffle(people)
                if turn or r.random() < 0.25:
                    people = people[:r.randint(1, n_facts)]
            else:
                people = [r.choice(people)]
            text = (USER if turn else "") + self.question(people, several)
            out.append((text + ASSISTANT + UNTHINK, CONTEXT))
            out.append(("\n".join(f"{n}={facts[n]}" for n in people) + EOS, 1.0))
        return out, facts


CAPITALS = dict(zip(
    "France Germany Italy Spain Portugal Austria Poland Greece Norway Sweden Finland Denmark "
    "Ireland Hungary Russia Turkey Egypt Japan China India Cuba Peru Chile Canada Kenya".split(),
    "Paris Berlin Rome Madrid Lisbon Vienna Warsaw Athens Oslo Stockholm Helsinki Copenhagen "
    "Dublin Budapest Moscow Ankara Cairo Tokyo Beijing Delhi Havana Lima Santiago Ottawa "
    "Nairobi".split()))
OPPOSITES = [p.split(":") for p in """hot:cold big:small up:down left:right fast:slow day:night
    old:new black:white open:closed happy:sad high:low long:short hard:soft light:dark rich:poor
    strong:weak full:empty early:late wet:dry loud:quiet near:far thick:thin first:last good:bad
    true:false""".split()]
COLORS = dict(p.split(":") for p in """grass:green snow:white coal:black blood:red sky:blue
    sun:yellow banana:yellow lemon:yellow tomato:red carrot:orange milk:white chocolate:brown
    sea:blue rose:red frog:green cherry:red plum:purple pig:pink""".split())
SOUNDS = dict(p.split(":") for p in """cat:meow dog:woof cow:moo duck:quack sheep:baa horse:neigh
    owl:hoot crow:caw goose:honk frog:ribbit pig:oink bee:buzz lion:roar mouse:squeak""".split())
WORDS = """apple river stone cloud tiger house green light music water bread chair table plant
horse mouse snake grass night storm train ocean piano lemon honey paper sugar silver garden window
cat dog sun red map cup hat box key fox owl bee""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November
December""".split()
FRUIT = "apple pear plum cherry lemon banana".split()

ABOUT = "I am Nano, a tiny DeepSeek V4 style model. I was trained on one CPU core."
HELP = ("I can recall facts from a story, add small numbers, spell numbers, name capitals, "
        "opposites and colors, and tell tiny stories.")
EASY = "This is easy."


class Chat:
    """Skills. Each returns (question, answer) or (question, answer, reasoning)."""

    def __init__(self, rng):
        self.rng = rng
        self.skills, self.weights = zip(
            (self.greet, 2), (self.add, 9), (self.subtract, 6), (self.to_digits, 3),
            (self.to_words, 3), (self.capital, 2), (self.opposite, 2), (self.color, 1.5),
            (self.sound, 1.5), (self.copy, 2), (self.reverse, 1.5), (self.upper, 1.5),
            (self.count, 2), (self.order, 1.5), (self.story, 2), (self.compare, 2.5),
            (self.listing, 1), (self.unknown, 2))

    def skill(self):
        return self.rng.choices(self.skills, self.weights)[0]()

    def greet(self):
        c = self.rng.choice
        return c([
            (c(["Hello", "Hi", "Hello!", "Hi there", "Hey", "Good morning"]),
             "Hello! How can I help you today?"),
            (c(["Who are you?", "What are you?", "What is your name?", "Tell me about yourself."]),
             ABOUT),
            (c(["What can you do?", "Help", "How can you help me?"]), HELP),
            (c(["How are you?", "How are you today?"]), "I am fine, thank you. How can I help?"),
            (c(["Thank you", "Thanks!", "Thank you very much."]), "You are welcome!"),
            (c(["Bye", "Goodbye", "See you later."]), "Goodbye! Have a nice day."),
        ])

    def add(self):
        r = self.rng
        top = 10 if r.random() < 0.6 else 50
        a, b = r.randrange(top), r.randrange(top)
        q = r.choice([f"What is {a} + {b}?", f"{a} + {b} = ?", f"Add {a} and {b}.",
                      f"What is {a} plus {b}?"])
        return q, f"{a + b}", f"{a} + {b} = {a + b}."

    def subtract(self):
        r = self.rng
        a, b = sorted((r.randrange(20), r.randrange(20)), reverse=True)
        q = r.choice([f"What is {a} - {b}?", f"{a} - {b} = ?", f"What is {a} minus {b}?"])
        return q, f"{a - b}", f"{a} - {b} = {a - b}."

    def to_digits(self):
        n = self.rng.randrange(100)
        q = self.rng.choice(["Write {} in digits.", "Write the number {} in digits.",
                             "{} in digits?"])
        return q.format(words(n)), f"{n}"

    def to_words(self):
        n = self.rng.randrange(100)
        q = self.rng.choice(["Write {} in words.", "Spell the number {}.", "{} in words?"])
        return q.format(n), words(n)

    def capital(self):
        k, v = self.rng.choice(list(CAPITALS.items()))
        if self.rng.random() < 0.2:
            return f"{v} is the capital of which country?", f"{v} is the capital of {k}."
        q = self.rng.choice(["What is the capital of {}?", "Capital of {}?",
                             "Name the capital of {}."])
        return q.format(k), f"The capital of {k} is {v}.", f"{k} has the capital {v}."

    def opposite(self):
        a, b = self.rng.choice(OPPOSITES)
        if self.rng.random() < 0.5:
            a, b = b, a
        q = self.rng.choice(["What is the opposite of {}?", "Opposite of {}?"])
        return q.format(a), f"The opposite of {a} is {b}."

    def color(self):
        k, v = self.rng.choice(list(COLORS.items()))
        q = self.rng.choice(["What color is {}?", "Which color does {} have?"])
        return q.format(k), f"{k.capitalize()} is {v}."

    def sound(self):
        k, v = self.rng.choice(list(SOUNDS.items()))
        q = self.rng.choice(["What does a {} say?", "Which sound does a {} make?"])
        return q.format(k), f"A {k} says {v}."

    def copy(self):
        r = self.rng
        w = " ".join(r.choice(WORDS) for _ in range(r.randint(1, 5)))
        return r.choice(["Repeat: {}", "Copy this: {}", "Say {}"]).format(w), w

    def reverse(self):
        w = [self.rng.choice(WORDS) for _ in range(self.rng.randint(2, 4))]
        return "Reverse the words: " + " ".join(w), " ".join(w[::-1])

    def upper(self):
        w = self.rng.choice(WORDS)
        q = self.rng.choice(["Write {} in capital letters.", "Uppercase: {}"])
        return q.format(w), w.upper()

    def count(self):
        r = self.rng
        n = r.randint(1, 9)
        w = r.choice(FRUIT)
        if r.random() < 0.5:
            return "Count the words: " + " ".join([w] * n), f"{n}"
        return "How many words: " + " ".join(r.choice(WORDS) for _ in range(n)), f"{n}"

    def order(self):
        r = self.rng
        names = DAYS if r.random() < 0.6 else MONTHS
        i = r.randrange(len(names))
        if r.random() < 0.5:
            after = names[(i + 1) % len(names)]
            return f"What comes after {names[i]}?", f"{after} comes after {names[i]}."
        return f"What comes before {names[i]}?", f"{names[i - 1]} comes before {names[i]}."

    def compare(self):
        a, b = self.rng.sample(range(1, 100), 2)
        high, low = max(a, b), min(a, b)
        return f"Which is larger, {a} or {b}?", f"{high} is larger.", f"{high} > {low}."

    def listing(self):
        return self.rng.choice([
            ("Name three colors.", "Red, green and blue."),
            ("Name the days of the week.", ", ".join(DAYS) + "."),
            ("Name three animals.", "A cat, a dog and a horse."),
            ("Count to five.", "1, 2, 3, 4, 5."),
            ("Count to ten.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
            ("Name three fruits.", "An apple, a pear and a plum."),
        ])

    def unknown(self):
        """Questions outside the closed world get an honest answer."""
        r = self.rng
        n, p, o, f, a = (r.choice(x) for x in (NAMES, PLACES, THINGS, FOODS, ADJECTIVES))
        q = r.choice([
            f"Who wrote {n}?", f"Who wrote the {o}?", "What is the weather?", "What time is it?",
            f"How old is {n}?", f"Where is the {p}?", f"Why is the {o} {a}?",
            f"Translate {f} into French.", f"What is the capital of {n}?", f"How do I make {f}?",
            f"Who is {n}?", "What is the meaning of life?", f"Write a poem about {o}.",
            f"What is the square root of {r.randrange(100)}?", f"Where does {n} live?",
            "Who won the game?"])
        return q, "I do not know.", "I was not trained on this."

    def memory(self):
        """Turns: a fact about the user, perhaps something between, the question."""
        r = self.rng
        kind = r.choice(["name", "color", "animal", "number"])
        if kind == "name":
            v = r.choice(NAMES)
            tell = r.choice([f"My name is {v}.", f"I am {v}.", f"Call me {v}."])
            turns = [(tell, f"Nice to meet you, {v}."), ("What is my name?", f"Your name is {v}.")]
        elif kind == "number":
            v = r.randrange(100)
            tell = r.choice([f"My number is {v}.", f"Remember the number {v}."])
            turns = [(tell, "I will remember that."),
                     ("What is my number?", f"Your number is {v}.")]
        else:
            v = r.choice("red blue green yellow black white".split())
            if kind == "animal":
                v = "the " + r.choice(ANIMALS)
            turns = [(f"My favorite {kind} is {v}.", "I will remember that."),
                     (f"What is my favorite {kind}?", f"Your favorite {kind} is {v}.")]
        return turns[:1] + [self.skill() for _ in range(r.choice([0, 0, 1, 1, 2]))] + turns[1:]

    def story(self):
        r = self.rng
        n, a, p, o, f = (r.choice(x) for x in (NAMES, ANIMALS, PLACES, THINGS, FOODS))
        named = r.random() < 0.5
        who = f"a {a} named {n}" if named else f"a {a}"
        q = r.choice([f"Tell me a story about {who}.", f"Write a tiny story about {who}."])
        if named:
            return q, r.choice([
                f"Once there was a {a} named {n}. {n} lived near the {p}. One day {n} found a {o} "
                f"and gave it to a friend. They ate {f} together and were happy.",
                f"{n} was a small {a}. Every day {n} went to the {p} to look for {f}. One day it "
                f"began to rain, and {n} hid under a {o}. Then the sun came back."])
        return q, r.choice([
            f"Once there was a {a} who lived near the {p}. One day the {a} found a {o} and gave it "
            f"to a friend. They ate {f} together and were happy.",
            f"A small {a} went to the {p} to look for {f}. It began to rain, and the {a} hid under "
            f"a {o}. Then the sun came back."])

    def document(self, max_turns=3):
        r = self.rng
        out = [(BOS, CONTEXT)]
        if r.random() < 0.25:
            out.append((r.choice(["You are a helpful assistant.", "You are a careful assistant."]),
                        CONTEXT))
        if r.random() < 0.12:
            turns = self.memory()
        else:
            turns = [self.skill() for _ in range(r.randint(1, max_turns))]
        for question, answer, *reasoning in turns:
            if r.random() < 0.4:
                out += [(USER + question + ASSISTANT + THINK, CONTEXT),
                        ((reasoning or [EASY])[0] + UNTHINK + answer + EOS, 1.0)]
            else:
                out += [(USER + question + ASSISTANT + UNTHINK, CONTEXT), (answer + EOS, 1.0)]
        return out


if __name__ == "__main__":
    demo = random.Random(1)
    print("".join(t for t, _ in Story(demo).document(4, 300, lambda s: len(s.split()), turns=2)[0]))
    for _ in range(6):
        print("".join(t for t, _ in Chat(demo).document()))
