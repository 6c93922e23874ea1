"""Items made to be awkward: accents, CJK, emoji, marks, empty and long texts."""

from kvlab.data.hellaswag_dataset import HellaSwagItem


def item(ind, label, activity, a, b, *endings):
    return HellaSwagItem(ind, activity, f"{a} {b}".strip(), a, b, endings, label)


ITEMS = [
    item(24, 3, "Roof shingle removal", "A man is sitting on a roof.", "he", "is using wrap.",
         "is ripping level tiles off.", "is holding a rubik's cube.", "starts pulling up roofing."),
    item(53, 0, "Clean and jerk", "Une élève naïve soulève la barre à l'école.", "elle",
         "la lève très haut, déjà épuisée.", "mange un gâteau.", "s'en va.", "où ça ?"),
    item(92, 2, "書道", "女の人が筆を持って座っています。", "彼女は", "紙に「永」と書きます。",
         "走ります。", "墨をすり、ゆっくりと字を書き始める。", "🎌"),
    item(101, 1, "Health", "[header] How to cope [title] Breathe.  [step] Sit down [substeps] "
         "Rest. [title]", "", "[step] Wait.", "Go  on [title] and on.", "a", ""),
    item(110, 1, "Finance", "The end of this context is stripped away [step]", "", "x", "y z",
         "Pay your bills. [title] Again.", "'s own"),
    item(120, 2, "Long", "word and word again " * 9, "SHE THEN", "stops.", "goes on " * 12,
         "runs.", "sleeps until noon."),
    item(131, 0, "", "", "", "only endings", "here", "and", "there"),
]  # fmt: skip
