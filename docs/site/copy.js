// The button of a block copies what can be run: no prompts, no output.
document.querySelectorAll(".md-typeset pre > code").forEach(code => {
  const lines = code.textContent.split("\n");
  if (!lines.some(line => line.startsWith(">>> "))) return;
  const runnable = lines.filter(line => /^(>>>|\.\.\.)( |$)/.test(line)).map(line => line.slice(4)).join("\n");
  const give = button => {
    button.removeAttribute("data-clipboard-target");
    button.setAttribute("data-clipboard-text", runnable);
  };
  const block = code.closest(".highlight") || code.parentElement;
  new MutationObserver(() => block.querySelectorAll("[data-clipboard-target]").forEach(give))
    .observe(block, { childList: true, subtree: true });
  block.querySelectorAll("[data-clipboard-target]").forEach(give);
});
