"""A text source: sums of two numbers, each with its result."""

from kvlab.extend import DocumentSource, Extension, SpecModel


class SumsOptions(SpecModel):
    largest: int = 99


class Sums(DocumentSource):
    name = "sums"
    licence = "none: counted"
    options = SumsOptions

    def documents(self, data):
        numbers = range(data.options.largest + 1)
        for first in numbers:
            yield "\n".join(f"{first} + {second} = {first + second}" for second in numbers)


extension = Extension(sources=(Sums(),))
