"""field_docs reads what stands below a field, and nothing else."""

from meshwright.spec.frozen import Frozen
from meshwright.spec.job.field_docs import field_docs


class Animal(Frozen):
    """A noun with all that may stand in one."""

    legs: int = 4
    """How many it has
    to stand on."""
    name: str = ""
    colour: str = "grey"
    """Seen by day."""
    """Said twice."""

    def speak(self) -> str:
        """Return no field's description."""
        return self.name


class Bird(Animal):
    """A noun made from another."""

    legs: int = 2
    """Always two."""
    wings: int = 2
    """To fly with."""


def test_a_field_has_the_text_below_it() -> None:
    assert field_docs(Animal) == {"legs": "How many it has\nto stand on.", "colour": "Seen by day."}


def test_a_noun_keeps_what_its_parent_says_unless_it_says_it_anew() -> None:
    assert field_docs(Bird) == {"legs": "Always two.", "colour": "Seen by day.", "wings": "To fly with."}
