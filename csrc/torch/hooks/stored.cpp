#include "torch/hooks/stored.h"

#include <ATen/core/Tensor.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "torch/python/rows.h"
#include "torch/python/tensors.h"
#include "torch/python/types.h"
#include "torch/read/slots.h"
#include "torch/read/tensor_view.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

struct StoredNames {
  PyObject* module = interned("module");
  PyObject* numbers = interned("numbers");
  PyObject* parameters = interned("_parameters");
  PyObject* buffers = interned("_buffers");
  PyObject* tensors = interned("tensors");
  PyObject* sites = interned("sites");
  PyObject* roles = interned("roles");
  PyObject* is_used_now = interned("is_used_now");
  // Attributes that libraries set on a tensor that holds its values elsewhere, or its gradient.
  PyObject* elsewhere[3] = {interned("_local_tensor"), interned("ds_tensor"),
                            interned("main_grad")};
};

const StoredNames& stored_names() {
  static const StoredNames* const kNames = new StoredNames;
  return *kNames;
}

py::object attribute(py::handle of, PyObject* name) {
  return owned(PyObject_GetAttr(of.ptr(), name));
}

// torch's own classes, and nothing in it that says that its values are elsewhere.
bool is_ordinary(PyObject* object) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != THPVariableClass && type != ParameterClass) return false;
  PyObject** const attributes = _PyObject_GetDictPtr(object);
  if (attributes == nullptr || *attributes == nullptr) return true;
  const auto& elsewhere = stored_names().elsewhere;
  return std::none_of(std::begin(elsewhere), std::end(elsewhere), [&](PyObject* name) {
    return PyDict_GetItemWithError(*attributes, name) != nullptr;
  });
}

// The object of Python's that a tensor has, as a release of torch keeps it; nullptr: none yet.
template <class Slot>
auto object_in(const Slot& slot, int) -> decltype(slot.load_pyobj()) {
  return slot.load_pyobj();
}

template <class Slot>
PyObject* object_in(const Slot& slot, long) {
  return slot.check_pyobj().value_or(nullptr);
}

// Without an object it is of no class but torch's own.
bool is_ordinary(const at::Tensor& tensor) {
  PyObject* const object = object_in(*tensor.unsafeGetTensorImpl()->pyobj_slot(), 0);
  return object == nullptr || is_ordinary(object);
}

// can_read() and has_memory() of Python; `is_used_now`: has arrived in any case.
bool can_be_read(const at::Tensor& tensor, bool is_used_now) {
  return has_plain_memory(tensor) && dtype_of(tensor.scalar_type()).has_value() &&
         (tensor.numel() == 0 || tensor.storage().nbytes() > 0) &&
         (is_used_now || !may_be_in_flight(tensor));
}

// ---- Lists --------------------------------------------------------------------------------------

template <class Visit>
void each_held(const py::sequence& groups, const Visit& visit) {
  for (const py::handle group : groups) {
    const py::object parameters = group["params"];
    for (const py::handle parameter : parameters) visit(parameter.ptr());
  }
}

// None: it is gone.
py::object module_of(py::handle node) {
  return owned(PyObject_CallNoArgs(attribute(node, stored_names().module).ptr()));
}

// The dict in which a module holds its tensors of `kind`; nullptr: the module is gone.
py::object tensors_of(const py::object& module, PyObject* kind) {
  if (module.is_none()) return {};
  py::object tensors = attribute(module, kind);
  if (!PyDict_Check(tensors.ptr())) throw py::type_error("expected a dict of tensors");
  return tensors;
}

template <class Visit>
void each_in(const py::object& tensors, const Visit& visit) {
  PyObject *name = nullptr, *tensor = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(tensors.ptr(), &place, &name, &tensor) != 0;) {
    if (tensor != Py_None) visit(name, tensor);
  }
}

// `ids`: None: it holds all.
bool holds(const py::object& ids, PyObject* tensor) {
  if (ids.is_none()) return true;
  const int is_held = PySet_Contains(ids.ptr(), owned(PyLong_FromVoidPtr(tensor)).ptr());
  if (is_held < 0) throw py::error_already_set();
  return is_held != 0;
}

void add_id(py::set& ids, PyObject* parameter) { ids.add(owned(PyLong_FromVoidPtr(parameter))); }

py::set parameter_ids(const py::sequence& groups) {
  py::set ids;
  each_held(groups, [&](PyObject* parameter) { add_id(ids, parameter); });
  return ids;
}

py::object gradients_in(const py::sequence& groups) {
  py::list gradients;
  std::optional<at::Device> device;
  bool are_ordinary = true;
  each_held(groups, [&](PyObject* parameter) {
    are_ordinary = are_ordinary && is_ordinary(parameter);
    if (!are_ordinary || !unpack(parameter).grad().defined()) return;
    const at::Tensor& gradient = unpack(parameter).grad();
    are_ordinary = is_ordinary(gradient) && gradient.layout() == at::kStrided &&
                   gradient.device() == device.value_or(gradient.device());
    device = gradient.device();
    gradients.append(wrap(gradient));
  });
  return are_ordinary ? py::object(std::move(gradients)) : py::none();
}

py::object stored_tensor(PyObject* node, PyObject* name, PyObject* tensor) {
  py::object stored = owned(PyTuple_Pack(3, node, name, tensor));
  // The collector, which so many new objects set going, would go through all of them.
  PyObject_GC_UnTrack(stored.ptr());
  return stored;
}

py::list stored_in(const py::sequence& nodes, const py::str& kind, const py::object& owned_ids) {
  py::list found;
  std::unordered_set<PyObject*> seen;
  if (!owned_ids.is_none()) seen.reserve(py::len(owned_ids));
  const bool are_parameters = PyUnicode_Compare(kind.ptr(), stored_names().parameters) == 0;
  for (const py::handle node : nodes) {
    const py::object tensors = tensors_of(module_of(node), kind.ptr());
    if (!tensors) continue;
    each_in(tensors, [&](PyObject* name, PyObject* tensor) {
      if (!holds(owned_ids, tensor)) return;
      if (are_parameters && !seen.insert(tensor).second) return;
      found.append(stored_tensor(node.ptr(), name, tensor));
    });
  }
  return found;
}

// A parameter as the program has it now. `sites`: where the numbers of its site and of its
// gradient's are kept; nullptr: nowhere.
struct Item {
  PyObject *node, *name, *tensor;
  py::object* sites;

  py::object stored() const { return stored_tensor(node, name, tensor); }
};

// The places of parameters in modules.
struct Places {
  struct Place {
    py::object node, name;
    std::array<py::object, 2> sites;
  };
  std::vector<Place> all;
};

// Parameters, for one update: to Python a sequence of what stored_in() returns.
struct ParameterList {
  std::shared_ptr<Places> places;
  py::list tensors;

  Item at(std::size_t i) const {
    Places::Place& place = places->all.at(i);
    return {place.node.ptr(), place.name.ptr(),
            PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i)), place.sites.data()};
  }
};

// No cycle is collected while it lives: what is known by its address only stays there.
struct CollectorPause {
  const bool was_on = PyGC_Disable() != 0;
  CollectorPause() = default;
  CollectorPause(const CollectorPause&) = delete;
  CollectorPause& operator=(const CollectorPause&) = delete;
  ~CollectorPause() {
    if (was_on) PyGC_Enable();
  }
};

// Finds the parameters of modules that an optimizer holds. What was found is kept from update to
// update, but none of the tensors: the groups and the modules are gone through again, and where
// they hold the same objects under the same names, whatever these are by now, so is the answer.
class ParameterFinder {
 public:
  explicit ParameterFinder(py::list nodes) : nodes_(std::move(nodes)) {}

  // `groups`: of the optimizer; None: all parameters. The ids of what it holds, the parameters,
  // and the buffers of all modules.
  py::tuple look(const py::object& groups) {
    const CollectorPause pause;
    Seen now;
    std::vector<py::object> dicts;  // a module may make its own at each call
    now.held.reserve(seen_.held.size());
    now.stored.reserve(seen_.stored.size());
    if (!groups.is_none()) {
      each_held(groups, [&](PyObject* parameter) { now.held.push_back(parameter); });
    }
    py::list buffers;
    for (const py::handle node : nodes_) {
      const py::object module = module_of(node);
      dicts.push_back(tensors_of(module, stored_names().parameters));
      if (dicts.back()) {
        each_in(dicts.back(),
                [&](PyObject* name, PyObject* tensor) { now.stored.push_back({name, tensor}); });
        each_in(tensors_of(module, stored_names().buffers), [&](PyObject* name, PyObject* tensor) {
          buffers.append(stored_tensor(node.ptr(), name, tensor));
        });
      }
      now.stored.push_back({nullptr, nullptr});
    }
    if (places_ == nullptr || now.held != seen_.held || now.stored != seen_.stored) {
      know(!groups.is_none(), now);
      seen_ = std::move(now);
    }
    py::list tensors(chosen_.size());
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
      constexpr std::size_t kAhead = 16;
      if (i + kAhead < chosen_.size()) {
        __builtin_prefetch(seen_.stored[chosen_[i + kAhead]].second);
      }
      tensors[i] = py::handle(seen_.stored[chosen_[i]].second);
    }
    return py::make_tuple(ids_, ParameterList{places_, std::move(tensors)}, std::move(buffers));
  }

 private:
  // Addresses: of what the groups hold, and of each module's names and parameters.
  struct Seen {
    std::vector<PyObject*> held;
    std::vector<std::pair<PyObject*, PyObject*>> stored;
  };

  void know(bool are_chosen, const Seen& now) {
    auto places = std::make_shared<Places>();
    chosen_.clear();
    std::unordered_set<PyObject*> left(now.held.begin(), now.held.end());
    std::size_t node = 0;
    for (std::size_t i = 0; i < now.stored.size(); ++i) {
      const auto [name, tensor] = now.stored[i];
      if (name == nullptr) {
        ++node;
      } else if (are_chosen ? left.erase(tensor) != 0 : left.insert(tensor).second) {
        places->all.push_back({nodes_[node], borrowed(name), {}});
        chosen_.push_back(i);
      }
    }
    py::set ids;
    for (PyObject* const parameter : now.held) add_id(ids, parameter);
    ids_ = are_chosen ? py::object(std::move(ids)) : py::none();
    places_ = std::move(places);
  }

  py::list nodes_;
  Seen seen_;
  // The places of the parameters in `stored`.
  std::vector<std::size_t> chosen_;
  std::shared_ptr<Places> places_;
  py::object ids_;
};

template <class Visit>
void each_stored(const py::object& stored, bool gradients, const Visit& visit) {
  if (py::isinstance<ParameterList>(stored)) {
    const auto& list = stored.cast<const ParameterList&>();
    const std::size_t count = list.places->all.size();
    const Lookahead lookahead(PySequence_Fast_ITEMS(list.tensors.ptr()), count, gradients);
    for (std::size_t i = 0; i < count; ++i) {
      lookahead(i);
      visit(list.at(i));
    }
    return;
  }
  for (const py::handle one : stored) {
    if (!PyTuple_Check(one.ptr()) || PyTuple_GET_SIZE(one.ptr()) != 3) {
      throw py::type_error("expected a module, a name and a tensor");
    }
    visit(Item{PyTuple_GET_ITEM(one.ptr(), 0), PyTuple_GET_ITEM(one.ptr(), 1),
               PyTuple_GET_ITEM(one.ptr(), 2), nullptr});
  }
}

struct Batch {
  py::object tensor_list;
  TensorList& tensors;
  py::object sites, roles;
  bool is_used_now;
  py::object role, add;

  Batch(const py::object& batch, const py::str& role, const py::object& add)
      : tensor_list(attribute(batch, stored_names().tensors)),
        tensors(tensor_list.cast<TensorList&>()),
        sites(attribute(batch, stored_names().sites)),
        roles(attribute(batch, stored_names().roles)),
        is_used_now(attribute(batch, stored_names().is_used_now).is(py::bool_(true))),
        role(role),
        add(add) {}

  // The number of the site, a borrowed reference; nullptr: there is none yet. It never changes.
  PyObject* site(const Item& item, std::size_t kind) const {
    if (item.sites != nullptr && item.sites[kind]) return item.sites[kind].ptr();
    const py::object numbers = attribute(item.node, stored_names().numbers);
    PyObject* const of_role = PyDict_GetItemWithError(numbers.ptr(), role.ptr());
    PyObject* const number =
        of_role == nullptr ? nullptr : PyDict_GetItemWithError(of_role, item.name);
    if (number != nullptr && item.sites != nullptr) item.sites[kind] = borrowed(number);
    return number;
  }

  // `tensor`: the parameter, or (`kind` is 1) its gradient.
  void append(const Item& item, const at::Tensor& tensor, std::size_t kind) {
    PyObject* const number = can_be_read(tensor, is_used_now) ? site(item, kind) : nullptr;
    if (number == nullptr) {
      add(item.stored());
      return;
    }
    tensors.add(tensor);
    checked(PyList_Append(sites.ptr(), number));
    checked(PyList_Append(roles.ptr(), role.ptr()));
  }
};

void add_stored(const py::object& batch, const py::object& stored, const py::str& role,
                const py::object& add) {
  Batch of(batch, role, add);
  each_stored(stored, false, [&](const Item& item) {
    if (is_ordinary(item.tensor)) {
      of.append(item, unpack(item.tensor), 0);
    } else {
      add(item.stored());
    }
  });
}

// Visits the gradients of the parameters; `add` takes a parameter that is not ordinary, or whose
// gradient is not.
template <class Visit>
void each_gradient(const py::object& stored, const py::object& add, Visit visit) {
  each_stored(stored, true, [&](const Item& item) {
    const at::Tensor* const gradient =
        is_ordinary(item.tensor) ? &unpack(item.tensor).grad() : nullptr;
    if (gradient == nullptr || (gradient->defined() && !is_ordinary(*gradient))) {
      add(item.stored());
    } else if (gradient->defined()) {
      visit(item, *gradient);
    }
  });
}

void add_gradients(const py::object& batch, const py::object& stored, const py::str& role,
                   const py::object& add) {
  Batch of(batch, role, add);
  each_gradient(stored, add, [&](const Item& item, const at::Tensor& gradient) {
    of.append(item, gradient, 1);
  });
}

py::tuple parameter_states(const py::object& stored, const py::object& state_of) {
  py::list trained, with_gradient, parts;
  each_stored(stored, false, [&](const Item& item) {
    if (!is_ordinary(item.tensor)) {
      const py::tuple state = state_of(item.stored());
      trained.append(state[0]);
      with_gradient.append(state[1]);
      parts.append(state[2]);
      return;
    }
    const at::Tensor& tensor = unpack(item.tensor);
    trained.append(py::bool_(tensor.requires_grad() && tensor.numel() > 0));
    with_gradient.append(py::bool_(tensor.grad().defined()));
    parts.append(py::bool_(false));
  });
  return py::make_tuple(trained, with_gradient, parts);
}

bool are_on_host(const py::object& tensors) {
  if (py::isinstance<TensorList>(tensors)) return tensors.cast<const TensorList&>().are_on_host;
  const py::list list = tensors;
  return std::all_of(list.begin(), list.end(),
                     [](py::handle tensor) { return unpack(tensor).is_cpu(); });
}

// `list` is a list of tensors, or a TensorList.
std::vector<at::Tensor> tensors_in(const py::object& list) {
  if (py::isinstance<TensorList>(list)) return list.cast<const TensorList&>().tensors().vec();
  std::vector<at::Tensor> tensors;
  for (const py::handle tensor : list) tensors.push_back(unpack(tensor));
  return tensors;
}

py::object common_device(const py::object& list) {
  const std::vector<at::Tensor> tensors = tensors_in(list);
  const bool are_together = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& one) {
    return one.device() == tensors.front().device();
  });
  if (tensors.empty() || !are_together) return py::none();
  return owned(THPDevice_New(tensors.front().device()));
}

py::array_t<long long> identities(const py::object& list, const std::vector<std::int32_t>& sites,
                                  std::int64_t step, std::int64_t first_seq, std::uint32_t flags,
                                  std::int64_t depth) {
  const std::vector<at::Tensor> tensors = tensors_in(list);
  const Depth checked = checked_depth(depth);
  if (sites.size() != tensors.size()) throw py::value_error("expected a site for each tensor");
  py::array_t<long long> rows(
      {static_cast<py::ssize_t>(tensors.size()), static_cast<py::ssize_t>(kIdentityNumbers)});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
    if (!dtype.has_value()) throw py::type_error(unreadable_reason(tensor, tensor.device().type()));
    const Identity identity{first_seq + static_cast<std::int64_t>(i), step, 0, sites[i], flags};
    write_identity(identity, static_cast<std::int64_t>(*dtype),
                   static_cast<std::int64_t>(order_of(tensor)), checked,
                   rows.mutable_data(static_cast<py::ssize_t>(i), 0));
  }
  return rows;
}

void append(TensorList& list, py::handle tensor) { list.add(unpack(tensor)); }

py::object tensor_at(const TensorList& list, std::size_t at) {
  const at::ArrayRef<at::Tensor> tensors = list.tensors();
  if (at >= tensors.size()) throw py::index_error();
  return wrap(tensors[at]);
}

TensorList part_of(const TensorList& list, const py::slice& part) {
  std::size_t first = 0, stop = 0, step = 0, count = 0;
  if (!part.compute(list.tensors().size(), &first, &stop, &step, &count)) {
    throw py::error_already_set();
  }
  if (step != 1) throw py::value_error("expected a slice without a step");
  return {list.all, list.first + first, list.first + first + count, list.are_on_host};
}

bool is_readable(py::handle object) {
  const at::Tensor& tensor = unpack(object);
  return is_ordinary(object.ptr()) && has_plain_memory(tensor) &&
         dtype_of(tensor.scalar_type()).has_value() && !may_be_in_flight(tensor);
}

double largest_magnitude(const py::array& records) {
  if (records.ndim() != 1 || records.itemsize() != sizeof(Record)) {
    throw py::type_error("expected an array of records");
  }
  double largest = 0.0;
  const auto* at = static_cast<const std::byte*>(records.data());
  for (py::ssize_t i = 0; i < records.size(); ++i, at += records.strides(0)) {
    const auto* const record = reinterpret_cast<const Record*>(at);
    for (const auto bits : {record->min, record->max}) {
      double extreme = 0.0;
      static_assert(sizeof bits == sizeof extreme);
      std::memcpy(&extreme, &bits, sizeof extreme);
      largest = std::max(largest, std::fabs(extreme));
    }
  }
  return largest;
}

// ---- Memory -------------------------------------------------------------------------------------

// The memory of a tensor. It keeps none alive, but while it lives no other storage gets the same
// address.
struct MemoryRef {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::StorageImpl* address;
  std::int64_t offset;

  explicit MemoryRef(const at::Tensor& tensor)
      : storage(tensor.storage().getWeakStorageImpl()),
        address(tensor.storage().unsafeGetStorageImpl()),
        offset(tensor.storage_offset()) {}

  bool is_of(const at::Tensor& tensor) const {
    return tensor.storage().unsafeGetStorageImpl() == address && tensor.storage_offset() == offset;
  }
};

// The same for Python. `other`: the class of Python for tensors that are not ordinary.
struct OrdinaryRef {
  MemoryRef memory;
  py::object other;
};

using MemoryRefObject = Object<OrdinaryRef>;

bool has_own_memory(PyObject* object) {
  return is_ordinary(object) && has_plain_memory(unpack(object));
}

PyObject* is_of(PyObject* self, PyObject* object) {
  return translated([&]() -> PyObject* {
    const auto& [memory, other] = MemoryRefObject::of(self);
    if (has_own_memory(object)) return PyBool_FromLong(memory.is_of(unpack(object)));
    const py::object address = owned(PyLong_FromVoidPtr(memory.address));
    return other.attr("is_at")(py::handle(object), address, memory.offset).release().ptr();
  });
}

PyMethodDef kMemoryRefMethods[] = {
    {"is_of", &is_of, METH_O, "is_of(self, tensor) -> bool"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kMemoryRefSlots[] = {
    {Py_tp_dealloc, as_slot(&MemoryRefObject::destroy)},
    {Py_tp_methods, kMemoryRefMethods},
    {0, nullptr},
};

PyType_Spec kMemoryRefSpec = {"fastcheck._C.MemoryRef", sizeof(MemoryRefObject), 0,
                              Py_TPFLAGS_DEFAULT, kMemoryRefSlots};

// Made by functions of the module alone.
PyTypeObject* type_without_new(PyType_Spec& spec) {
  PyTypeObject* const fresh = new_type(spec);
  fresh->tp_new = nullptr;
  return fresh;
}

PyTypeObject* memory_ref_type() {
  static PyTypeObject* const made = type_without_new(kMemoryRefSpec);
  return made;
}

py::object memory_ref(const py::object& other, py::handle object) {
  if (!has_own_memory(object.ptr())) return other(object);
  return owned(MemoryRefObject::make(memory_ref_type(), MemoryRef(unpack(object)), other));
}

// ---- Gradients that were read early -------------------------------------------------------------

// Knows a gradient again while nothing has written to it since it was read, or changed() was told.
class ReadGradients {
 public:
  // The tensors were read in this order, the first as the record `first`.
  void add(const py::object& tensors, long long first) {
    for (const at::Tensor& tensor : tensors_in(tensors)) {
      known_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                              Reading{MemoryRef(tensor), version_of(tensor), first++});
    }
  }

  // The number of its record.
  std::optional<long long> find(const at::Tensor& gradient) {
    const Reading* const reading = reading_of(gradient);
    if (reading == nullptr || reading->version != version_of(gradient)) return std::nullopt;
    return reading->seq;
  }

  void changed(const py::iterable& gradients) {
    for (const py::handle gradient : gradients) {
      Reading* const reading = reading_of(unpack(gradient));
      if (reading != nullptr) reading->version = version_of(unpack(gradient));
    }
  }

  void clear() { known_.clear(); }
  std::size_t size() const { return known_.size(); }

 private:
  struct Reading {
    MemoryRef memory;
    std::int64_t version;
    long long seq;
  };

  static std::int64_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<std::int64_t>(tensor._version());
  }

  Reading* reading_of(const at::Tensor& gradient) {
    const auto found = known_.find(gradient.unsafeGetTensorImpl());
    const bool is_same =
        found != known_.end() && has_plain_memory(gradient) && found->second.memory.is_of(gradient);
    return is_same ? &found->second : nullptr;
  }

  std::unordered_map<const at::TensorImpl*, Reading> known_;
};

void add_unread_gradients(const py::object& batch, const py::object& stored, const py::str& role,
                          const py::object& add, ReadGradients& read, const py::list& sites,
                          const py::list& numbers) {
  Batch of(batch, role, add);
  each_gradient(stored, add, [&](const Item& item, const at::Tensor& gradient) {
    const std::optional<long long> number = read.find(gradient);
    PyObject* const site = number.has_value() ? of.site(item, 1) : nullptr;
    if (site == nullptr) {
      of.append(item, gradient, 1);
      return;
    }
    checked(PyList_Append(sites.ptr(), site));
    checked(PyList_Append(numbers.ptr(), py::int_(*number).ptr()));
  });
}

py::list holders_of(const py::iterable& gradients, const py::object& stored) {
  std::unordered_set<const at::TensorImpl*> wanted;
  for (const py::handle gradient : gradients) {
    wanted.insert(unpack(gradient).unsafeGetTensorImpl());
  }
  py::list holders;
  each_stored(stored, true, [&](const Item& item) {
    const py::object gradient = py::handle(item.tensor).attr("grad");
    if (gradient.is_none()) return;
    if (wanted.count(unpack(gradient).unsafeGetTensorImpl()) != 0) holders.append(item.stored());
  });
  return holders;
}

// ---- Probes -------------------------------------------------------------------------------------

// A gradient as it was.
struct GradientProbe {
  MemoryRef memory;
  std::int64_t version;
  std::int64_t numel;
  std::vector<std::int32_t> elements;
};

using ProbeObject = Object<GradientProbe>;

// The bits of the first elements of a float32 gradient that can be read at once: a NaN is not equal
// to itself. None on a device, for which nothing is to wait.
std::vector<std::int32_t> first_elements(const at::Tensor& gradient, std::int64_t most) {
  if (!gradient.is_cpu()) return {};
  const auto* const first = static_cast<const std::int32_t*>(gradient.const_data_ptr());
  return {first, first + std::min(gradient.numel(), most)};
}

std::vector<std::int32_t> now_of(const GradientProbe& probe, const at::Tensor& gradient) {
  return first_elements(gradient, static_cast<std::int64_t>(probe.elements.size()));
}

bool can_be_probed(PyObject* object) {
  if (!is_ordinary(object)) return false;
  const at::Tensor& tensor = unpack(object);
  if (!can_be_read(tensor, false)) return false;
  return !tensor.is_cpu() || (tensor.is_contiguous() && tensor.scalar_type() == at::kFloat);
}

bool has_changed(const GradientProbe& probe, PyObject* object) {
  const at::Tensor& gradient = unpack(object);
  return !(can_be_probed(object) && probe.memory.is_of(gradient) &&
           gradient._version() == probe.version && now_of(probe, gradient) == probe.elements);
}

PyObject* is_changed(PyObject* self, PyObject* object) {
  return translated([&] { return PyBool_FromLong(has_changed(ProbeObject::of(self), object)); });
}

PyObject* has_same_elements(PyObject* self, PyObject* object) {
  return translated([&]() -> PyObject* {
    const GradientProbe& then = ProbeObject::of(self);
    const bool can_compare = can_be_probed(object) && unpack(object).is_cpu();
    if (!can_compare || unpack(object).numel() != then.numel) Py_RETURN_NONE;
    return PyBool_FromLong(now_of(then, unpack(object)) == then.elements);
  });
}

PyMethodDef kProbeMethods[] = {
    {"is_changed", &is_changed, METH_O, "is_changed(self, gradient) -> bool"},
    {"has_same_elements", &has_same_elements, METH_O,
     "has_same_elements(self, tensor) -> bool | None"},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* version(PyObject* self, void*) {
  return PyLong_FromLongLong(ProbeObject::of(self).version);
}

PyGetSetDef kProbeProperties[] = {
    {"version", &version, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot kProbeSlots[] = {
    {Py_tp_dealloc, as_slot(&ProbeObject::destroy)},
    {Py_tp_methods, kProbeMethods},
    {Py_tp_getset, kProbeProperties},
    {0, nullptr},
};

PyType_Spec kProbeSpec = {"fastcheck._C.GradientProbe", sizeof(ProbeObject), 0, Py_TPFLAGS_DEFAULT,
                          kProbeSlots};

PyTypeObject* probe_type() {
  static PyTypeObject* const made = type_without_new(kProbeSpec);
  return made;
}

py::object gradient_probe(py::handle object, std::int64_t elements) {
  if (!can_be_probed(object.ptr())) return py::none();
  const at::Tensor& gradient = unpack(object);
  return owned(ProbeObject::make(probe_type(), MemoryRef(gradient),
                                 static_cast<std::int64_t>(gradient._version()), gradient.numel(),
                                 first_elements(gradient, elements)));
}

// A place is a module's node and the name of a parameter; nullptr: there is none now.
py::object parameter_at(py::handle place) {
  const py::object tensors = tensors_of(module_of(place[py::int_(0)]), stored_names().parameters);
  const py::object name = place[py::int_(1)];
  PyObject* const found = tensors ? PyDict_GetItemWithError(tensors.ptr(), name.ptr()) : nullptr;
  return found == nullptr || found == Py_None ? py::object() : borrowed(found);
}

py::object gradient_probes(const py::list& places, std::int64_t elements) {
  py::dict probes;
  for (const py::handle place : places) {
    const py::object parameter = parameter_at(place);
    if (!parameter) continue;
    if (!is_ordinary(parameter.ptr())) return py::none();
    const at::Tensor& gradient = unpack(parameter).grad();
    if (!gradient.defined()) continue;
    const py::object probe = gradient_probe(wrap(gradient), elements);
    if (probe.is_none()) return py::none();
    probes[place] = probe;
  }
  return probes;
}

py::object take_changed(const py::dict& probes, const py::object& owned_ids) {
  std::vector<std::array<py::object, 3>> due;
  for (const auto& [place, probe] : probes) {
    py::object parameter = parameter_at(place);
    if (!parameter || !holds(owned_ids, parameter.ptr())) continue;
    if (!is_ordinary(parameter.ptr()) || Py_TYPE(probe.ptr()) != probe_type()) return py::none();
    due.push_back({borrowed(place.ptr()), borrowed(probe.ptr()), std::move(parameter)});
  }
  for (const auto& [place, probe, parameter] : due) {
    checked(PyDict_DelItem(probes.ptr(), place.ptr()));
    const at::Tensor& gradient = unpack(parameter).grad();
    if (!gradient.defined()) continue;
    if (has_changed(ProbeObject::of(probe.ptr()), wrap(gradient).ptr())) return py::bool_(true);
  }
  return py::bool_(false);
}

}  // namespace

void define_stored(py::module_& m) {
  m.def("parameter_ids", parameter_ids, py::arg("groups"));
  m.def("stored_in", stored_in, py::arg("nodes"), py::arg("kind"), py::arg("owned"));
  py::class_<TensorList>(m, "TensorList")
      .def(py::init<>())
      .def("__len__", [](const TensorList& list) { return list.tensors().size(); })
      .def("__getitem__", &tensor_at)
      .def("__getitem__", &part_of)
      .def("append", &append, py::arg("tensor"));
  py::class_<ParameterList>(m, "ParameterList")
      .def("__len__", [](const ParameterList& list) { return list.places->all.size(); })
      .def("__getitem__",
           [](const ParameterList& list, std::size_t i) { return list.at(i).stored(); });
  py::class_<ParameterFinder>(m, "ParameterFinder")
      .def(py::init<py::list>(), py::arg("nodes"))
      .def("look", &ParameterFinder::look, py::arg("groups"));
  m.def("add_stored", add_stored, py::arg("batch"), py::arg("stored"), py::arg("role"),
        py::arg("add"));
  m.def("add_gradients", add_gradients, py::arg("batch"), py::arg("stored"), py::arg("role"),
        py::arg("add"));
  m.def("parameter_states", parameter_states, py::arg("stored"), py::arg("state_of"));
  m.def("is_readable", is_readable, py::arg("tensor"));
  m.def("largest_magnitude", largest_magnitude, py::arg("records"));
  m.def("gradients_in", gradients_in, py::arg("groups"));
  m.def("are_on_host", are_on_host, py::arg("tensors"));
  m.def("common_device", common_device, py::arg("tensors"));
  m.def("identities", identities, py::arg("tensors"), py::arg("sites"), py::arg("step"),
        py::arg("first_seq"), py::arg("flags"), py::arg("depth"));
  py::class_<ReadGradients>(m, "ReadGradients")
      .def(py::init<>())
      .def("__len__", &ReadGradients::size)
      .def("add", &ReadGradients::add, py::arg("tensors"), py::arg("first"))
      .def(
          "find",
          [](ReadGradients& read, py::handle gradient) { return read.find(unpack(gradient)); },
          py::arg("gradient"))
      .def("changed", &ReadGradients::changed, py::arg("gradients"))
      .def("clear", &ReadGradients::clear);
  m.def("add_unread_gradients", add_unread_gradients, py::arg("batch"), py::arg("stored"),
        py::arg("role"), py::arg("add"), py::arg("read"), py::arg("sites"), py::arg("numbers"));
  m.def("holders_of", holders_of, py::arg("gradients"), py::arg("stored"));
  m.attr("MemoryRef") = py::handle(reinterpret_cast<PyObject*>(memory_ref_type()));
  m.def("memory_ref", memory_ref, py::arg("other"), py::arg("tensor"));
  m.attr("GradientProbe") = py::handle(reinterpret_cast<PyObject*>(probe_type()));
  m.def("gradient_probe", gradient_probe, py::arg("gradient"), py::arg("elements"));
  m.def("gradient_probes", gradient_probes, py::arg("places"), py::arg("elements"));
  m.def("take_changed", take_changed, py::arg("probes"), py::arg("owned"));
}

}  // namespace fastcheck
