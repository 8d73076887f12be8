// Where the reader is, kept in the address: #/VIEW?name=value&..

export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path || "overview", query: [...new URLSearchParams(query)] };
}

export function address(view, query) {
  const text = new URLSearchParams(query).toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

export function go(view, query = []) {
  location.hash = address(view, query);
}

// The address alone; nothing is drawn anew.
export function note(view, query) {
  history.replaceState(null, "", address(view, query));
}

export const one = (query, name) => query.find(([key]) => key === name)?.[1];
export const many = (query, name) => query.filter(([key]) => key === name).map(([, value]) => value);
export const without = (query, ...names) => query.filter(([key]) => !names.includes(key));
