"""The kinds of word problem: their wordings, number ranges and calculations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """A kind of problem: alternative wordings over the same numbers and the same calculations.

    `ranges` gives the inclusive bounds of each number. An operand in `steps` is one of those
    numbers, a constant, or `r1`, `r2` for the result of the first or the second step.
    """

    wordings: tuple[str, ...]
    ranges: dict[str, tuple[int, int]]
    steps: tuple[str, ...]


NAMES = (
    "Ada", "Amir", "Anna", "Ben", "Bruno", "Carla", "Chen", "Clara", "Diego", "Elif", "Emma",
    "Farid", "Felix", "Grace", "Hana", "Hugo", "Ines", "Ivan", "Jack", "Julia", "Kofi", "Lena",
    "Leo", "Lucy", "Maria", "Mateo", "Mia", "Nadia", "Nina", "Noah", "Olga", "Omar", "Oscar",
    "Paul", "Priya", "Rosa", "Sam", "Sara", "Tom", "Yuki",
)  # fmt: skip
ITEMS = (
    "apples", "balls", "beads", "books", "buttons", "cakes", "candles", "cards", "coins",
    "cookies", "cups", "eggs", "flowers", "hats", "keys", "lamps", "lemons", "marbles",
    "muffins", "notebooks", "oranges", "pears", "pencils", "pens", "plates", "ribbons",
    "shells", "stamps", "stickers", "toys",
)  # fmt: skip
PLACES = (
    "bakery", "farm", "garden", "hotel", "library", "market", "museum", "office", "park",
    "school", "shop", "station", "theatre", "village",
)  # fmt: skip
CONTAINERS = ("bags", "baskets", "boxes", "crates", "jars", "packs")

TEMPLATES = (
    Template(
        (
            "{name} has {a} {item}. {other} gives {name} {b} more. How many {item} does {name} have now?",
            "There are {a} {item} at the {place}. {name} brings {b} more {item}. "
            "How many {item} are at the {place} now?",
        ),
        {"a": (5, 99), "b": (5, 99)},
        ("a + b",),
    ),
    Template(
        (
            "{name} had {a} {item} and gave {b} of them to {other}. How many {item} does {name} have left?",
            "The {place} had {a} {item} and {name} took {b} of them. "
            "How many {item} does the {place} still have?",
        ),
        {"a": (10, 99), "b": (3, 90)},
        ("a - b",),
    ),
    Template(
        (
            "The {place} has {a} shelves with {b} {item} on each shelf. How many {item} are there in total?",
            "{name} fills {a} {container} and puts {b} {item} into each. How many {item} does {name} need?",
        ),
        {"a": (2, 9), "b": (2, 25)},
        ("a * b",),
    ),
    Template(
        (
            "{name} shares {a} {item} equally among {b} friends. How many {item} does each friend get?",
            "{name} packs {a} {item} into {b} {container} with the same number in each. "
            "How many {item} are in each?",
        ),
        {"a": (10, 120), "b": (2, 9)},
        ("a / b",),
    ),
    Template(
        (
            "{name} sold {a} {item} on Monday, {b} on Tuesday and {c} on Wednesday. "
            "How many {item} did {name} sell altogether?",
            "{a} people came to the {place} in May, {b} in June and {c} in July. "
            "How many people came in the three months?",
        ),
        {"a": (5, 80), "b": (5, 80), "c": (5, 80)},
        ("a + b", "r1 + c"),
    ),
    Template(
        (
            "{name} buys {a} {item} for ${b} each and pays with ${c}. How much change does {name} get?",
            "{name} has ${c} and goes to the {place} to buy {a} {item} at ${b} each. "
            "How many dollars are left?",
        ),
        {"a": (2, 9), "b": (2, 15), "c": (20, 150)},
        ("a * b", "c - r1"),
    ),
    Template(
        (
            "{name} has {a} {item}. {other} has {b} times as many. How many {item} do they have together?",
            "{name} found {a} {item} and {other} found {b} times as many {item} as {name}. "
            "How many did they find in all?",
        ),
        {"a": (3, 30), "b": (2, 6)},
        ("a * b", "r1 + a"),
    ),
    Template(
        (
            "{name} has {a} {container} with {b} {item} in each, and {c} {item} on the table. "
            "How many {item} does {name} have?",
            "The {place} ordered {a} {container} of {b} {item} and already had {c} {item}. "
            "How many {item} does the {place} have now?",
        ),
        {"a": (2, 9), "b": (2, 20), "c": (3, 60)},
        ("a * b", "r1 + c"),
    ),
    Template(
        (
            "{name} had {a} {item}, but {b} of them were lost. The others fill {container} "
            "of {c} {item} each. How many {container} does {name} fill?",
            "Of {a} {item}, {name} keeps {b} and splits the rest equally among {c} friends. "
            "How many {item} does each friend get?",
        ),
        {"a": (20, 120), "b": (2, 40), "c": (2, 9)},
        ("a - b", "r1 / c"),
    ),
    Template(
        (
            "{name} earns ${a} an hour and works {b} hours a day. "
            "How many dollars does {name} earn in {c} days?",
            "At the {place}, {name} makes {a} {item} an hour for {b} hours every day. "
            "How many {item} does {name} make in {c} days?",
        ),
        {"a": (2, 12), "b": (2, 8), "c": (2, 6)},
        ("a * b", "r1 * c"),
    ),
    Template(
        (
            "A bus leaves the {place} with {a} people. At the first stop {b} get off and {c} get "
            "on. How many people are on the bus then?",
            "{name} had {a} {item}, gave {b} to {other} and then bought {c} more. "
            "How many {item} does {name} have?",
        ),
        {"a": (15, 90), "b": (3, 60), "c": (3, 60)},
        ("a - b", "r1 + c"),
    ),
    Template(
        (
            "{name} buys {a} {item} at ${b} each and {c} {second} at ${d} each. "
            "How many dollars does {name} pay?",
            "{name} carries {a} {container} of {b} {item} and {c} {container} of {d} {second}. "
            "How many things does {name} carry?",
        ),
        {"a": (2, 9), "b": (2, 12), "c": (2, 9), "d": (2, 12)},
        ("a * b", "c * d", "r1 + r2"),
    ),
    Template(
        (
            "A book has {a} pages. {name} reads {b} pages a day for {c} days. How many pages are left?",
            "The {place} has {a} {item} and uses {b} of them every day. "
            "How many {item} are left after {c} days?",
        ),
        {"a": (40, 200), "b": (3, 20), "c": (2, 7)},
        ("b * c", "a - r1"),
    ),
    Template(
        (
            "{name} saves ${a} every week for {b} weeks and then buys {item} for ${c}. "
            "How much money does {name} have left?",
            "{name} sells {a} {item} for ${b} each after paying ${c} to rent a table. "
            "How much money does {name} make?",
        ),
        {"a": (3, 20), "b": (2, 9), "c": (5, 60)},
        ("a * b", "r1 - c"),
    ),
    Template(
        (
            "{a} girls and {b} boys at the {place} form teams of {c}. How many teams are there?",
            "{name} picks {a} {item} and {other} picks {b}. They put {c} {item} into each bag. "
            "How many bags do they fill?",
        ),
        {"a": (8, 60), "b": (8, 60), "c": (2, 9)},
        ("a + b", "r1 / c"),
    ),
    Template(
        (
            "{name} made {a} {item}. {other} made {b} more than {name}. "
            "How many {item} did they make together?",
            "The {place} sold {a} {item} today and {b} more than that yesterday. "
            "How many {item} were sold on the two days?",
        ),
        {"a": (5, 70), "b": (3, 40)},
        ("a + b", "r1 + a"),
    ),
    Template(
        (
            "There are {a} dogs and {b} ducks at the {place}. How many legs do they have in all?",
            "{name} counts {a} cows and {b} hens near the {place}. How many legs is that?",
        ),
        {"a": (2, 25), "b": (2, 25)},
        ("a * 4", "b * 2", "r1 + r2"),
    ),
    Template(
        (
            "{name} is {a} years old and {other} is {b} years younger. How old will {other} be in {c} years?",
            "{other} is {b} years younger than {name}, who is {a}. "
            "What will be the age of {other} after {c} years?",
        ),
        {"a": (12, 80), "b": (2, 40), "c": (2, 20)},
        ("a - b", "r1 + c"),
    ),
    Template(
        (
            "{name} had {a} {item}, sold half of them and then bought {b} more. "
            "How many {item} does {name} have now?",
            "Half of the {a} {item} at the {place} are sold, and then {b} new ones arrive. "
            "How many {item} are there now?",
        ),
        {"a": (6, 120), "b": (3, 60)},
        ("a / 2", "r1 + b"),
    ),
    Template(
        (
            "{name} bakes {a} trays of {b} cookies and eats {c} of them. The rest go into bags "
            "of {d}. How many bags are filled?",
            "{name} opens {a} {container} of {b} {item}, keeps {c} {item} and shares the rest "
            "equally among {d} friends. How many {item} does each friend get?",
        ),
        {"a": (2, 9), "b": (4, 15), "c": (2, 20), "d": (2, 9)},
        ("a * b", "r1 - c", "r2 / d"),
    ),
)
