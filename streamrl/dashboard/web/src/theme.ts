/** Light or dark: as the system is, unless somebody chose. */
const KEY = "streamrl-theme";

function chosen(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

const system = matchMedia("(prefers-color-scheme: dark)");

export function isDark(): boolean {
  return (chosen() ?? (system.matches ? "dark" : "light")) === "dark";
}

export function applyTheme(): void {
  document.documentElement.dataset["theme"] = isDark() ? "dark" : "light";
  window.dispatchEvent(new Event("themed"));
}

export function toggleTheme(): void {
  try {
    localStorage.setItem(KEY, isDark() ? "light" : "dark");
  } catch {
    return;
  }
  applyTheme();
}

system.addEventListener("change", applyTheme);
