#!/usr/bin/env python3
"""Writes a seeded story in which some people are assigned numbers, and asks for the numbers at the
end: a test of long memory. Ages, prices, dates and counts in between do not count.

    make_story.py --style nano --tokens 1900 --facts 16            a prompt for tests/data/nano.gguf
    make_story.py --scenes 190 --facts 16 >story.txt               over 30,000 tokens of free prose
    make_story.py --style nano --count 8 --script >stories.jsonl   cases for ds4 --script

The nano style uses the words that the model in tests/data knows and counts tokens with its
vocabulary; the prose style is for a full-size model and counts words and signs, which is what its
vocabulary does with plain English (within 2 %). Python standard library only.
"""
import argparse
import json
import os
import random
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "nano"))
sys.dont_write_bytecode = True
import data  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402


class Nano:
    """Exactly the stories the nano model was trained on."""
    TOKENS_PER_SCENE, TOKENS_PER_FACT = 50, 8
    names = data.NAMES

    def __init__(self, rng):
        self.rng, self.story = rng, data.Story(rng)
        self.count = Tokenizer(os.path.join(sys.path[0], "tokenizer.json")).count

    def facts(self, n):
        return self.story.facts(n)

    def frame(self, people):
        """(before the story, the question)"""
        return self.rng.choice(data.Story.INTRO), self.story.question(people, True)

    def scenes(self, facts, n_scenes, budget):
        scenes = self.story.scenes(facts, budget, self.count, 0.5, n_scenes)
        return "\n".join(" ".join(s) for s in scenes)


class Prose:
    """Free prose: a town, its people, their errands, and clerks who assign numbers."""
    TOKENS_PER_SCENE, TOKENS_PER_FACT = 165, 12
    names = """Adele Agnes Albert Amara Arthur Astrid Beatrice Benjamin Bernard Bridget Caspar Cecilia
    Charles Constance Cyril Daphne David Dorothea Duncan Edith Edmund Eleanor Elias Esther Eugene
    Florence Francis Frederick Geoffrey George Gloria Harold Harriet Helen Henry Ingrid Isaac Isabel
    Jasper Joan Josephine Judith Julian Katherine Kenneth Laura Lawrence Leonard Lydia Mabel Marcus
    Margaret Martin Matilda Miriam Nathan Nicholas Nigel Olive Oliver Pauline Philip Rachel Ralph
    Rebecca Richard Robert Roger Ruth Samuel Sylvia Theodore Thomas Ursula Vincent Violet Walter
    Winifred""".split()

    SLOTS = {
        "place": """the harbor|the fish market|the old library|the railway station|the town hall|the
            botanical garden|the stone bridge|the grammar school|the little theater|the watermill|the
            ruined castle|the county museum|the printer's workshop|the hospital kitchen|the clock
            tower|the chapel|the upper orchard|the stables|the wine cellar|the courthouse|the post
            office|the lighthouse|the brewery|the tannery|the glassworks|the ferry landing""",
        "thing": """lantern|wicker basket|sealed letter|copper kettle|ladder|faded map|winter coat|
            brass bell|pocket watch|silk ribbon|hammer|oval mirror|oak barrel|umbrella|woollen
            blanket|candlestick|violin|tin bucket|train ticket|parcel|leather satchel|telescope|
            chess set|bundle of newspapers|sack of flour|box of nails|roll of canvas""",
        "quality": """old|battered|handsome|heavy|unusual|broken|freshly painted|narrow|borrowed|
            carefully mended|dusty|expensive|forgotten|delicate|clumsy|polished""",
        "mood": """cheerful|impatient|oddly silent|tired|in no hurry|worried|hungry|full of plans|a
            little embarrassed|out of breath|proud|unwilling to argue""",
        "food": """barley soup|fresh bread|goat cheese|honey cakes|baked apples|smoked fish|plum
            cake|strong tea|butter biscuits|onion pie|roasted chestnuts|lentil stew""",
        "animal": """a grey cat|a stray dog|an old horse|two crows|a nervous goat|a pair of ducks|a barn
            owl|a fox|a flock of geese|a white rabbit""",
        "weather": """A thin rain|Thick fog|A cold wind|Wet snow|Pale sunlight|A sudden storm|Morning
            mist|Dry heat""",
        "time": """Early in the morning|Around noon|Shortly before supper|When the rain had stopped|
            Late that evening|At dusk|Close to midnight|On the following day|A little later|On the way
            home|As the bells rang|While the others were asleep|After the meeting|Before the shops
            opened""",
        "trade": """baker|carpenter|postmaster|nurse|stationmaster|librarian|ferryman|schoolteacher|
            blacksmith|gardener|innkeeper|watchmaker|tailor|harbor pilot""",
        "topic": """the price of timber|the new railway timetable|the missing keys|a letter from
            abroad|the state of the roads|the coming election|the broken pump|the choir's next
            concert|the flood of long ago|an unpaid bill|the school inspection|a rumor about the
            mill""",
        "month": "January|March|April|May|June|August|September|October|November|December",
        "ordinal": """second|third|fifth|seventh|ninth|eleventh|fourteenth|sixteenth|nineteenth|
            twentieth|twenty-third|twenty-eighth""",
    }
    OPENING = [
        "{time}, the day began slowly at {place}, and {N} was {mood}.",
        "{weather} hung over {place} when {N} arrived with {M}.",
        "{N} had promised to meet {M} at {place}, but neither of them was punctual.",
        "Nobody had expected {N} at {place} so soon, least of all the {trade}.",
        "{time}, a crowd had gathered in front of {place} because of {topic}.",
        "The road to {place} was closed, so {N} and {M} took the long way round.",
    ]
    FILLER = [
        "{time}, {N} carried a {quality} {thing} all the way to {place} without once setting it down.",
        "{N} and {M} talked about {topic} until the {trade} asked them to lower their voices.",
        "{place!c} smelled of {food}, and {animal} waited patiently beside the door.",
        "Somebody had left a {quality} {thing} on the steps, and for a while nobody dared to touch it.",
        "{N} repaired the {thing} with a piece of wire while {M} prepared {food} in the back room.",
        "The {trade} remembered {topic} quite differently and said so more than once.",
        "{M} laughed at the idea, shook the rain from a {quality} {thing}, and sat down by the window.",
        "From the window one could see {place}, where {animal} crossed the square and disappeared.",
        "{N} wrote a long letter about {topic}, read it twice, and put it away unsent.",
        "It was said that the {trade} knew more about {topic} than the newspapers did.",
        "{N} looked for the {thing} everywhere, even behind the stove, but found only {food}.",
        "\"We should have gone to {place} instead,\" said {M}, who was {mood} by then.",
        "\"Leave the {thing} where it is,\" {N} answered, \"and help me with the {food}.\"",
        "{weather} made the streets slippery, so that the {trade} closed earlier than usual.",
        "{M} offered {N} a plate of {food} and asked, not for the first time, about {topic}.",
        "On the wall hung a {quality} picture of {place}, painted before either of them was born.",
        "{N} borrowed the {thing} from the {trade} and forgot to bring it back.",
        "They agreed that {topic} could wait, and that {food} could not.",
        "{animal!c} had slept on the {quality} {thing}, which surprised {N} less than it surprised {M}.",
        "By the time {N} reached {place}, the {trade} had already gone home.",
    ]
    NOISE = [
        "{N} was {age} years old and did not mind saying so.",
        "{N} had paid {k} crowns for the {thing}, which {M} thought far too much.",
        "It took {N} exactly {k} steps to cross the yard of {place}.",
        "The {trade} counted {k} boats from {place} and wrote nothing down.",
        "{M} had been waiting for {N} since the {ordinal} of {month}.",
        "The train on the {ordinal} of {month} had been {k} minutes late, as {N} well remembered.",
        "According to {M}, room {k} was the coldest one in the building.",
        "A {thing} like that cost {k} crowns in the city, or so {N} believed.",
        "{N} guessed {k}, but it was only a guess and had nothing to do with the assignments.",
        "{M} owed the {trade} {k} crowns and {N} somewhat less.",
        "The choir had {k} members that year, among them {N}.",
        "{N} was born on the {ordinal} of {month}, {k} miles from {place}.",
    ]
    FACT = [
        "{N} was assigned the number {k}.",
        "{time}, {N} was assigned the number {k}.",
        "At {place}, {N} was assigned the number {k}.",
        "{N} was assigned the number {k}, and the clerk entered it in the register.",
        "Then, in front of everybody, {N} was assigned the number {k}.",
        "{N} nodded when {N} was assigned the number {k}.",
    ]

    def __init__(self, rng):
        self.rng = rng
        self.slots = {k: [" ".join(x.split()) for x in v.split("|")] for k, v in self.SLOTS.items()}

    @staticmethod
    def count(text):
        return len(re.findall(r"[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]", text))

    def facts(self, n):
        numbers = self.rng.sample(range(10, 1000), n)
        return dict(zip(self.rng.sample(self.names, n), numbers))

    def frame(self, people):
        return (
            "Read the following story. In the course of it some people are assigned a number, in a "
            "sentence like \"Somebody was assigned the number five\". Other numbers, such as ages, "
            "prices, dates and room numbers, do not matter.",
            "The story ends here. Which numbers were assigned to these people: " + ", ".join(people) +
            "?\nAnswer with one line for each of them, in this order, in the form Name=number with "
            "the number in digits, for example Somebody=5. Write nothing else.")

    def sentence(self, templates, name=None, number=None, used=None):
        r = self.rng
        n, m = r.sample(self.names, 2)
        slot = {k: r.choice(v) for k, v in self.slots.items()}
        template = r.choice([t for t in templates if not used or t not in used] or templates)
        if used is not None:
            used.add(template)
        for k in ("place", "animal"):                    # at the beginning of a sentence
            template = template.replace("{%s!c}" % k, slot[k][0].upper() + slot[k][1:])
        k = data.words(r.randrange(11, 400) if number is None else number)
        text = template.format(N=name or n, M=m if m != name else n, k=k,
                               age=data.words(r.randrange(12, 96)), **slot)
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)

    def scenes(self, facts, n_scenes, budget):
        """Facts lie in scenes of their own, spread evenly over the story."""
        r = self.rng
        scenes = [[self.sentence(self.OPENING)] for _ in range(max(n_scenes, len(facts)))]
        share = len(scenes) / max(1, len(facts))
        for i, (name, number) in enumerate(facts.items()):
            at = int((i + r.random()) * share)
            scenes[at].append(self.sentence(self.FACT, name, number))
            scenes[at].insert(r.randint(1, 2), self.sentence(self.NOISE, name))
        left = budget - sum(self.count(x) for s in scenes for x in s)
        used = [set() for _ in scenes]                   # templates, so that no scene repeats one
        while left > 0:
            i = min(r.sample(range(len(scenes)), min(2, len(scenes))), key=lambda i: len(scenes[i]))
            templates = self.NOISE if r.random() < 0.15 else self.FILLER
            x = self.sentence(templates, used=used[i])
            left -= self.count(x)
            scenes[i].insert(r.randint(1, len(scenes[i])), x)
        return "\n\n".join(" ".join(s) for s in scenes)


STYLES = {"nano": Nano, "prose": Prose}


def make_story(style, seed, n_facts, n_scenes=0, n_tokens=0):
    """The prompt and its facts {name: number}. n_tokens: wanted length of the whole prompt; else
    the number of scenes decides."""
    s = STYLES[style](random.Random(f"{style} {seed} {n_facts} {n_scenes} {n_tokens}"))
    if not 1 <= n_facts <= len(s.names):
        raise SystemExit(f"make_story: {style} stories have 1 to {len(s.names)} facts, not {n_facts}")
    facts = s.facts(n_facts)
    people = list(facts)
    s.rng.shuffle(people)
    before, question = s.frame(people)
    if not n_tokens:
        n_tokens = max(n_scenes, n_facts) * s.TOKENS_PER_SCENE + s.count(before + question)
    budget = n_tokens - s.count(before + question) - 6
    n_scenes = n_scenes or budget // s.TOKENS_PER_SCENE
    if style == "nano":
        n_scenes = 0                                     # one per fact, as in training
    story = s.scenes(facts, n_scenes, budget)
    return f"{before}\n\n{story}\n\n{question}", {n: facts[n] for n in people}


def make_case(style, seed, n_facts, n_scenes=0, n_tokens=0):
    """A line of a script file."""
    prompt, facts = make_story(style, seed, n_facts, n_scenes, n_tokens)
    size = f"{n_tokens} tokens" if n_tokens else f"{n_scenes} scenes"
    limit = 20 + len(facts) * STYLES[style].TOKENS_PER_FACT
    return {"name": f"{style} story {seed}: {size}, {n_facts} facts",
            "messages": [{"role": "user", "content": prompt}], "think": False, "n": limit,
            "facts": {n: str(k) for n, k in facts.items()}}


def main():
    ap = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--style", choices=STYLES, default="prose")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--scenes", type=int, default=0)
    ap.add_argument("--facts", type=int, default=16)
    ap.add_argument("--tokens", type=int, default=0, help="length of the prompt instead of --scenes")
    ap.add_argument("--script", action="store_true", help="a case for ds4 --script, with the facts")
    ap.add_argument("--count", type=int, default=1, help="with --script: that many seeds")
    a = ap.parse_args()
    if not a.script:
        print(make_story(a.style, a.seed, a.facts, a.scenes, a.tokens)[0])
        return
    for seed in range(a.seed, a.seed + a.count):
        print(json.dumps(make_case(a.style, seed, a.facts, a.scenes, a.tokens), ensure_ascii=False))


if __name__ == "__main__":
    main()
