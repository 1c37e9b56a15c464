// Keyboard shortcuts for the buttons and links of the page.
"use strict";
const cards = [...document.querySelectorAll("[data-card]")];
let current = Math.max(0, cards.findIndex((card) => "#" + card.id === location.hash));

function visit(index) {
  if (!cards.length) return;
  current = Math.min(cards.length - 1, Math.max(0, index));
  cards[current].focus();
}

function follow(relation) {
  const link = document.querySelector(`a[rel=${relation}]`);
  if (link) link.click();
}

function press(element) {
  if (element) element.click();
}

function edit(card) {
  const box = card.querySelector(".edit");
  box.open = true;
  box.querySelector("textarea").focus();
}

const actions = {
  j: () => visit(current + 1),
  k: () => visit(current - 1),
  n: () => follow("next"),
  p: () => follow("prev"),
  u: () => press(document.querySelector(".said [data-undo]")),
  s: () => press(document.querySelector(".bar button")),
  e: () => cards.length && edit(cards[current]),
  b: () => cards.length && press(cards[current].querySelector("[data-better]")),
  w: () => cards.length && press(cards[current].querySelector("[data-worse]")),
  "?": () => {
    const keys = document.getElementById("keys");
    if (!keys) return;
    keys.open = !keys.open;
    keys.querySelector("summary").focus();
  },
};

document.addEventListener("keydown", (event) => {
  const field = event.target.closest("textarea, select, input:not([type=radio])");
  if (field) {
    if (event.key === "Escape") visit(current);
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && field.form) field.form.requestSubmit();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^[1-5]$/.test(event.key) && cards.length) {
    event.preventDefault();
    press(cards[current].querySelectorAll(".stars button")[Number(event.key) - 1]);
  } else if (Object.hasOwn(actions, event.key)) {
    event.preventDefault();
    actions[event.key]();
  }
});

for (const [index, card] of cards.entries()) card.addEventListener("focusin", () => { current = index; });

// Submit a form only once, even if the response is slow.
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.dataset.sent) event.preventDefault();
  form.dataset.sent = "yes";
});
window.addEventListener("pageshow", () => { for (const form of document.forms) delete form.dataset.sent; });

if (location.hash && cards.length) visit(current);
