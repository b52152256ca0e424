// Scores of search results: pages for users come first, then the reference, then reasons.
// Part of the built pages (html_search_scorer in conf.py); the other numbers are Sphinx's own.
var Scorer = {
  score: ([page, title, , , score, , kind]) => {
    if (page.startsWith("decisions/") || page === "architecture") return score - 3000;
    if (!page.startsWith("reference") && page !== "api_index") return score;
    // A name as it is written in code is looked up; a word is not, though a module is called so.
    const isName = kind === "object" && score >= 1000 && /[A-Z_]/.test(title.split(".").pop());
    const isMet = /^reference\/(strategies|replica|values|input)$/.test(page); // by every program
    return isName ? score + (isMet ? 1 : 0) : score - 2000;
  },
  objNameMatch: 1000,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
