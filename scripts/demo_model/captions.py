"""The grammar of the sentences: what a scene's caption is."""

from collections.abc import Iterator

from .scenes import COLOURS, FLOORS, KINDS, SHAPES, SKIES, Scene, Thing

_VERBS = {
    "roll": "rolls to the {way}",
    "slide": "slides to the {way}",
    "bounce": "bounces to the {way}",
    "orbit": "circles {centre} {way}",
}
_WORDS = {("fall", -1): "rises up", ("fall", 1): "falls down", ("grow", -1): "shrinks", ("grow", 1): "grows"}


def caption(scene: Scene) -> str:
    """Return the sentence of a scene, such as "a red ball rolls to the right over a green floor"."""
    beside = scene.others[1:] if scene.kind == "orbit" else scene.others
    clause = f"{_noun(scene.actor)} {_verb(scene)}"
    if beside:
        clause += " next to " + " and ".join(_noun(thing) for thing in beside)
    floor, sky = f"over a {scene.floor} floor", f"under a {scene.sky} sky"
    return (
        f"{clause} {floor}",
        f"{clause} {floor} {sky}",
        f"{sky}, {clause}",
        f"{floor}, {clause}",
    )[scene.wording]


def all_words() -> Iterator[str]:
    """Yield every word of the grammar, so that a tokenizer knows those that a draw of captions may lack."""
    yield from (*SHAPES, *COLOURS, *FLOORS, *SKIES, *(word for pair in KINDS.values() for word in pair))


def _noun(thing: Thing) -> str:
    article = "an" if thing.colour[0] in "aeiou" else "a"
    return f"{article} {thing.colour} {thing.shape}"


def _verb(scene: Scene) -> str:
    fixed = _WORDS.get((scene.kind, scene.direction))
    if fixed:
        return fixed
    centre = _noun(scene.others[0]) if scene.others else ""
    return _VERBS[scene.kind].format(way=KINDS[scene.kind][scene.direction > 0], centre=centre)
