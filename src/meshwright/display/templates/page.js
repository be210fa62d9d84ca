"use strict";
// Sorting, filtering and folding of tables. Without this the tables are whole, in their first order.
(() => {
  const make = (name, more) => Object.assign(document.createElement(name), more);
  const number = new Intl.NumberFormat("en");

  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
  };

  const compare = (a, b) =>
    typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });

  const setUp = (box) => {
    const table = box.querySelector("table");
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    let rows = [...body.rows];
    const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    const most = Number(box.dataset.shown) / (matchMedia("(max-width: 720px)").matches ? 3 : 1);
    const shown = rows.length > 1.3 * most ? Math.round(most) : Infinity; // no button for a few more
    const count = make("output", {});
    const all = make("button", { type: "button", className: "all" });
    let unfolded = false;

    const refresh = (words) => {
      let found = 0;
      for (const row of rows) {
        const text = texts.get(row);
        const fits = words.every((word) => text.includes(word));
        found += fits ? 1 : 0;
        row.classList.toggle("out", !fits);
        row.classList.toggle("more", fits ? !unfolded ? found > shown : false : false);
      }
      const total = number.format(rows.length);
      count.textContent = found === rows.length ? `${total} rows` : `${number.format(found)} of ${total} rows`;
      all.hidden = unfolded ? true : !(found > shown);
      all.textContent = `Show all ${number.format(found)} rows`;
    };

    const filter = make("input", { type: "search", placeholder: "Filter" });
    filter.setAttribute("aria-label", `Filter: ${table.caption.textContent}`);
    const words = () => filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    filter.addEventListener("input", () => refresh(words()));
    all.addEventListener("click", () => { unfolded = true; refresh(words()); });

    const sort = (column, way) => {
      heads.forEach((head, i) => {
        if (i === column) head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
        else head.removeAttribute("aria-sort");
      });
      const keyed = rows.map((row) => [value(row, column), row]);
      rows = keyed.sort(([a], [b]) => way * compare(a, b)).map(([, row]) => row);
      body.append(...rows);
      refresh(words());
    };

    const order = make("select", {});
    order.append(make("option", { textContent: "as it is", value: "" }));
    heads.forEach((head, column) => {
      const isNumber = rows.some((row) => row.cells[column].dataset.v !== undefined);
      const button = make("button", { type: "button", textContent: head.textContent });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        const first = isNumber ? -1 : 1;
        sort(column, now === null ? first : now === "ascending" ? -1 : 1);
      });
      order.append(make("option", { textContent: button.textContent, value: `${column} ${isNumber ? -1 : 1}` }));
    });
    order.addEventListener("change", () => {
      if (order.value) sort(...order.value.split(" ").map(Number));
    });

    // Short tables are read at a glance.
    if (rows.length > 8) {
      const tools = make("div", { className: "tools" });
      const label = make("label", { className: "order", textContent: "Sort by " });
      label.append(order);
      tools.append(filter, label, count);
      box.prepend(tools);
      box.append(all);
    }
    refresh([]);
  };

  document.querySelectorAll(".tablebox[data-shown]").forEach(setUp);

  // Paper shows what is folded away, and repeats headings on each page if they hold no buttons.
  let closed = [];
  let buttons = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("section > details:not([open])")];
    closed.forEach((each) => { each.open = true; });
    buttons = [...document.querySelectorAll("th button")].map((each) => [each.parentNode, each]);
    buttons.forEach(([head, each]) => { head.textContent = each.textContent; });
  });
  addEventListener("afterprint", () => {
    closed.forEach((each) => { each.open = false; });
    buttons.forEach(([head, each]) => head.replaceChildren(each));
  });
})();
