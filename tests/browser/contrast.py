"""Contrast of text by WCAG 2.2: the colours of a page, and the ratio of two."""

from __future__ import annotations

# Every visible text with its colour on the first opaque background behind it, both as sRGB bytes.
TEXT_COLOURS = """() => {
    const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const bytes = (colour) => {
        context.clearRect(0, 0, 1, 1);
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data];
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        const words = walker.currentNode.data.trim();
        if (!words || !node.checkVisibility({ opacityProperty: true })) continue;
        if (node.closest("script, style, .unseen, fieldset:disabled")) continue;
        let behind = node;
        while (behind && bytes(getComputedStyle(behind).backgroundColor)[3] < 255) {
            behind = behind.parentElement;
        }
        const back = getComputedStyle(behind ?? document.body).backgroundColor;
        found.push([words, bytes(getComputedStyle(node).color), bytes(back)]);
    }
    return found;
}"""


def luminance(colour: list[int]) -> float:
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
             for c in (x / 255 for x in colour[:3])]  # fmt: skip
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: list[int], other: list[int]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
