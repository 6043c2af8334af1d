/** Which colour and pattern stands for what; the colours themselves are in style.css, for light and dark. */

interface Look {
  colour: string;
  /** Hatched: time in which something waits. So states differ without colour, too. */
  hatched: boolean;
}

const LOOKS: Record<string, Look> = {
  training: { colour: "--c-train", hatched: false },
  train: { colour: "--c-train", hatched: false },
  reward_model: { colour: "--c-before", hatched: false },
  old_log_prob: { colour: "--c-before", hatched: false },
  ref: { colour: "--c-before", hatched: false },
  teacher: { colour: "--c-before", hatched: false },
  values: { colour: "--c-before", hatched: false },
  reward: { colour: "--c-before", hatched: false },
  advantage: { colour: "--c-before", hatched: false },
  update_critic: { colour: "--c-before", hatched: false },
  wait_data: { colour: "--c-wait", hatched: true },
  wait_order: { colour: "--c-order", hatched: true },
  sync: { colour: "--c-sync", hatched: false },
  hand_off: { colour: "--c-handoff", hatched: false },
  checkpoint: { colour: "--c-checkpoint", hatched: false },
  validation: { colour: "--c-validation", hatched: false },
  validate_beside: { colour: "--c-validation", hatched: false },
  bookkeeping: { colour: "--c-minor", hatched: false },
  unaccounted: { colour: "--c-minor", hatched: true },
  busy: { colour: "--c-busy", hatched: false },
  no_credit: { colour: "--c-order", hatched: true },
  no_requests: { colour: "--c-pending", hatched: true },
  wait_credit: { colour: "--c-order", hatched: true },
  tool: { colour: "--c-ready", hatched: false },
  open_tool: { colour: "--bad", hatched: true },
  pending: { colour: "--c-pending", hatched: false },
  generating: { colour: "--c-generating", hatched: false },
  ready: { colour: "--c-ready", hatched: false },
};

/** What a training rank was told to do, by how its name begins. */
function ofTask(task: string): string {
  if (/^(update|train)/.test(task)) return "--c-train";
  if (/^(compute|score)/.test(task)) return "--c-before";
  if (/^(publish|send|gather)/.test(task)) return "--c-sync";
  if (/^(save|load|init|write|finish)/.test(task)) return "--c-checkpoint";
  return "--c-minor";
}

export function look(what: string): Look {
  return LOOKS[what] ?? { colour: ofTask(what), hatched: false };
}

/** The value of a colour of style.css, for canvases. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
