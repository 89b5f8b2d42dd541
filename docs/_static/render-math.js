// Renders the formulas that the extension flowbnn_site.katex wrote as TeX.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".tex")) {
    const displayMode = element.classList.contains("tex-display");
    katex.render(element.textContent, element, { displayMode, throwOnError: false });
  }
});
