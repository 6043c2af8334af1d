/** Numbers, times and text for people. */

const NOTHING = "–";

export function count(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)} G`;
  if (size >= 1e6) return `${trim(value / 1e6)} M`;
  if (size >= 1e4) return `${trim(value / 1e3)} k`;
  if (Number.isInteger(value)) return String(value);
  return trim(value);
}

function trim(value: number): string {
  const size = Math.abs(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 0.01 ? value.toFixed(2) : value.toExponential(1);
}

export function figure(value: number | null | undefined, digits = 3): string {
  if (value == null || !Number.isFinite(value)) return NOTHING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}

export function percent(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return NOTHING;
  const hundred = 100 * value;
  return `${hundred > 0 && hundred < 1 ? "<1" : hundred.toFixed(0)} %`;
}

export function bytes(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[at]}`;
}

export function duration(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return NOTHING;
  if (seconds < 0.0995) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(seconds < 0.995 ? 2 : 1)} s`;
  if (seconds < 60) return `${seconds.toFixed(0)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function age(since: number | null | undefined, now: number): string {
  return since == null ? NOTHING : now - since < 1 ? "< 1 s" : duration(now - since);
}

export function clock(time: number): string {
  return new Date(1000 * time).toLocaleTimeString([], { hour12: false });
}

/**
 * Text that somebody else wrote, fit to be shown: control characters and marks that turn the direction of writing are
 * made visible, so that it can neither hide nor move anything. (Nothing is ever put into the page as HTML.)
 */
export function inert(text: unknown, longest = 2000): string {
  const shown = String(text).slice(0, longest);
  return shown.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (sign) => {
    const code = sign.charCodeAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : `‹${code.toString(16)}›`;
  });
}

export function words(name: string): string {
  return NAMES[name] ?? name.replaceAll("_", " ");
}

/** Causes and activities as people call them. */
const NAMES: Record<string, string> = {
  training: "Training",
  train: "Update",
  wait_data: "Waiting for data",
  wait_order: "Held back by order",
  sync: "Weight sync",
  hand_off: "Hand-off",
  checkpoint: "Checkpoint",
  validation: "Validation",
  bookkeeping: "Bookkeeping",
  unaccounted: "Unaccounted",
  reward_model: "Reward model",
  old_log_prob: "Old log-probs",
  ref: "Reference log-probs",
  teacher: "Teacher log-probs",
  values: "Values",
  reward: "KL reward",
  advantage: "Advantages",
  update_critic: "Critic update",
  busy: "Generating",
  no_credit: "Idle: no credit",
  no_requests: "Idle: sessions are elsewhere",
  wait_credit: "Waiting for credit",
  tool: "Tool call",
  open_tool: "Tool call, not back",
  validate_beside: "Validation beside training",
};
